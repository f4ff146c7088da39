"""Turns what obstore raises into one sentence.

An error of a server may quote the request: its key's id, its signature, what was signed, a query
with a token. So nothing of it is passed on but the status, the code, and the reason of a failed
connection.
"""

import re
from typing import Final

from trainsync.storage.objects.errors import (
    ObjectMissingError,
    StoreError,
    StoreRefusedError,
    StoreUnavailableError,
)

_STATUS: Final = re.compile(r"status(?: code)?:?\s+(\d{3})")
_CODE: Final = re.compile(r"(?:<Code>\s*|\(code: )([A-Za-z0-9.]{1,64})(?:\s*</Code>|\))")
"""Of an answer, or of one object of a request that deletes many."""
_NUMBER: Final = re.compile(r"^[1-5][0-9]{2}$")
"""A code that is the status: Azure's of one object of many that are deleted."""
_REGION: Final = re.compile(r"expecting '([a-z0-9-]{1,32})'|<Region>([a-z0-9-]{1,32})</Region>")
_METADATA: Final = re.compile(
    r"169\.254\.169\.254|fd00:ec2|metadata\.google\.internal|169\.254\.170"
)
_BUCKET_CODES: Final = frozenset({"NoSuchBucket", "ContainerNotFound"})
_MISSING_CODES: Final = frozenset({None, "NoSuchKey", "BlobNotFound", "404"})
"""None: an answer to HEAD has no body. Other codes come with 404, too. Azure's of a deletion is a
number."""
_REGION_CODES: Final = frozenset(
    {"AuthorizationHeaderMalformed", "PermanentRedirect", "IllegalLocationConstraintException"}
)
_CREDENTIALS: Final = {
    "ExpiredToken": "the credentials have expired",
    "TokenRefreshRequired": "the credentials have expired",
    "InvalidToken": "the session token is not valid",
    "InvalidAccessKeyId": "the access key is not known",
    "XAdminUserNotFound": "the access key is not known",
    "SignatureDoesNotMatch": "the secret key does not belong to the access key",
    "RequestTimeTooSkewed": "the clocks of this machine and of the store differ too much",
}
_CONNECTIONS: Final = {
    "dns error": "its host's name cannot be resolved",
    "ConnectionRefused": "the connection was refused",
    "ConnectionReset": "the connection was reset",
    "BadScheme": "plain http was not asked for",
    "certificate": "its certificate is not trusted",
    "TimedOut": "it did not answer in time",
    "timed out": "it did not answer in time",
}


def translate(error: Exception, doing: str, store: str) -> StoreError:
    """``error`` of obstore as one of ours.

    Args:
        doing: such as ``reading KEY``.
        store: its URL.
    """
    text = str(error)
    status = match[1] if (match := _STATUS.search(text)) else None
    code = match[1] if (match := _CODE.search(text)) else None
    if status is None and code is not None and _NUMBER.match(code):
        status = code
    where = f"{store}, {doing}"
    if code in _BUCKET_CODES:
        return StoreRefusedError(f"{where}: there is no such bucket")
    if code in _REGION_CODES or "incorrectly configured region" in text:
        found = match[1] or match[2] if (match := _REGION.search(text)) else None
        hint = f"it is in {found}" if found else "it is in another one"
        return StoreRefusedError(
            f"{where}: the region is wrong, {hint}; give --region or AWS_REGION"
        )
    if isinstance(error, FileNotFoundError) and code in _MISSING_CODES:
        return ObjectMissingError(f"{where}: there is no such object")
    if code in _CREDENTIALS:
        return StoreRefusedError(f"{where}: {_CREDENTIALS[code]} ({code})")
    if _METADATA.search(text):
        return StoreRefusedError(
            f"{where}: no credentials were found: neither in the environment (for S3 "
            "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY), nor from this machine's own service"
        )
    said = ", ".join(dict.fromkeys(part for part in (status, code) if part))
    if status in ("401", "403") or code == "AccessDenied":
        return StoreRefusedError(f"{where}: access is denied ({said})")
    if status is not None and status[0] in "34" and status not in ("408", "409", "429"):
        return StoreRefusedError(f"{where}: the store refused the request ({said})")
    why = next((said for sign, said in _CONNECTIONS.items() if sign in text), None)
    if status is not None:
        why = f"the store answered {said}, also when it was asked again"
    return StoreUnavailableError(f"{where}: {why or 'the request failed'}")
