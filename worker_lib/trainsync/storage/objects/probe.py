"""Whether a store honours conditional puts, found by trying: without them two writers could both
commit."""

import logging
import secrets

from trainsync.storage.objects import keys
from trainsync.storage.objects.bucket import ObjectBucket
from trainsync.storage.objects.errors import (
    ConditionRefusedError,
    ObjectChangedError,
    ObjectExistsError,
    StoreError,
    StoreRefusedError,
    UnconditionalStoreError,
)

_LOG = logging.getLogger(__name__)


def require_conditional_puts(bucket: ObjectBucket, *, anew: bool = False) -> None:
    """Try both kinds of conditional puts on an object of our own, which is removed again.

    Args:
        anew: objects will be put where others were removed: try that, too.

    Raises:
        UnconditionalStoreError: the store puts regardless, or none where one was removed.
        StoreError: it cannot be tried.
    """
    key = f"{keys.PROBES}/{secrets.token_hex(8)}"
    try:
        _try(bucket, key)
        if anew:
            _try_anew(bucket, key)
    finally:
        try:
            bucket.delete([key])
        except StoreError as error:  # a credential that may not delete can still commit
            _LOG.info("an object of a few bytes stays: %s", error)


def _try(bucket: ObjectBucket, key: str) -> None:
    bucket.create(key, b"first")
    try:
        bucket.create(key, b"second")
    except ObjectExistsError:
        pass
    else:
        raise _refusal(bucket, "a put with `If-None-Match: *` replaced an object")
    first = bucket.get(key)
    if first.etag is None and first.version is None:
        raise _refusal(bucket, "it gives objects no e-tag")
    try:
        bucket.replace(key, b"third", first)
    except NotImplementedError:
        raise _refusal(bucket, "it cannot replace an object of a given e-tag") from None
    try:
        bucket.replace(key, b"fourth", first)
    except ObjectChangedError:
        return
    raise _refusal(bucket, "a put with `If-Match` replaced an object of another e-tag")


def _try_anew(bucket: ObjectBucket, key: str) -> None:
    """S3 does, but some servers count the mark that a bucket with versions has of a removal."""
    try:
        bucket.delete([key])
    except StoreRefusedError:
        return  # a credential that may not delete removes nothing later either
    try:
        bucket.create(key, b"fifth")
    except ConditionRefusedError:
        raise UnconditionalStoreError(
            f"{bucket.name} refuses an object where one was removed, as some servers do in a "
            "bucket that keeps versions, so that no step could be saved again: give a bucket "
            "without versions"
        ) from None


def _refusal(bucket: ObjectBucket, why: str) -> UnconditionalStoreError:
    return UnconditionalStoreError(
        f"{bucket.name} does not honour conditional puts ({why}), and so can hold no commits: "
        "use S3, GCS, Azure or a store that does; a directory is given without file://"
    )
