"""How pods reach a bucket: keys of its Secret, as variables."""

from typing import Any

from trainsync.api.bucket import CREDENTIALS, BucketCredentials, BucketPlace


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
