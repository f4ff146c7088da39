"""How pods reach a bucket: variables with its place, and keys of its Secret."""

from typing import Any

from trainsync.api import env
from trainsync.api.bucket import CREDENTIALS, BucketCredentials, BucketPlace
from trainsync.api.quantities import Quantity

from trainsync_operator.builders.target import Target


def credentials(
    place: BucketPlace, given: BucketCredentials | None, prefix: str = ""
) -> list[dict[str, Any]]:
    """Keys of the Secret, which the kubelet reads: the operator has no right to.

    Args:
        prefix: of the variables' names.
    """
    if given is None:
        return []
    secret = given.secret_ref.name
    return [
        {
            "name": f"{prefix}{key}",
            "valueFrom": {"secretKeyRef": {"name": secret, "key": key, "optional": True}},
        }
        for key in CREDENTIALS[place.scheme]
    ]


def _text(quantity: Quantity | None) -> str | None:
    return None if quantity is None else str(quantity)


def of_run(target: Target, *, opens: bool = True, reads: bool = False) -> list[dict[str, Any]]:
    """Variables of the run's bucket; none where a volume has the checkpoints.

    Args:
        opens: whether processes of the pod read or write checkpoints: others get no keys.
        reads: whether they only read the weights of sync method checkpoint there.
    """
    store = target.run.spec.checkpoint.storage.object_store
    if store is None:
        return []
    values = {
        env.STORE_ENDPOINT: store.endpoint,
        env.STORE_REGION: store.region,
        env.STORE_ALLOW_HTTP: "true" if store.allow_http else None,
        env.STORE_UPLOAD_BYTES_PER_SECOND: _text(store.upload_bytes_per_second) if opens else None,
    }
    keys = store.credentials if opens or reads else None
    if reads and store.read_credentials is not None:
        keys = store.read_credentials
    return [
        *({"name": name, "value": value} for name, value in values.items() if value is not None),
        *credentials(store, keys, env.STORE_CREDENTIAL_PREFIX),
    ]
