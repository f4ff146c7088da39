"""Turns what huggingface_hub raises into one sentence.

Its errors and warnings quote URLs, and those of uploads are signed: who has one may use it. So
nothing of them is passed on but the status, the server's own sentence, and the kind of the error.
"""

import re
from typing import Final

import httpx
from huggingface_hub.errors import (
    HfHubHTTPError,
    LocalTokenNotFoundError,
    OfflineModeIsEnabled,
    RevisionNotFoundError,
)

from trainsync.checkpoint.hub.errors import PushError

_MAY_PASS: Final = frozenset({408, 412, 429, 500, 502, 503, 504})
"""412: another commit was faster; on top of that one it can be tried again."""
_NO_TOKEN: Final = "set HF_TOKEN, or log in with `hf auth login`"
_LONGEST: Final = 200
_URL: Final = re.compile(r"\w+://\S+")
_TOKEN: Final = re.compile(r"\bhf_\w+")


def may_pass(error: Exception) -> bool:
    """Whether to try again may help."""
    if isinstance(error, OfflineModeIsEnabled):
        return False
    if isinstance(error, HfHubHTTPError):
        return error.response.status_code in _MAY_PASS
    return isinstance(error, httpx.TransportError)


def translate(error: Exception, repo: str, revision: str) -> PushError:
    """``error`` of huggingface_hub as ours."""
    found: BaseException = error
    while found.__cause__ is not None and not isinstance(
        found, HfHubHTTPError | httpx.TransportError
    ):
        found = found.__cause__  # an upload's error has the reason as its cause
    if isinstance(found, OfflineModeIsEnabled):
        return PushError(f"{repo}: HF_HUB_OFFLINE is set, and a push needs the network")
    if isinstance(found, LocalTokenNotFoundError):
        return PushError(f"{repo}: no token; {_NO_TOKEN}")
    if isinstance(found, HfHubHTTPError):
        return PushError(f"{repo}: {_refusal(found, revision)}")
    if isinstance(found, httpx.TimeoutException):
        return PushError(f"{repo}: the hub did not answer in time")
    if isinstance(found, httpx.TransportError):
        return PushError(f"{repo}: the hub cannot be reached ({type(found).__name__})")
    return PushError(f"{repo}: {type(found).__name__}: {_plain(str(found))}")


def _refusal(error: HfHubHTTPError, revision: str) -> str:
    status = error.response.status_code
    if status == 401:
        return f"the token is not valid (401); {_NO_TOKEN}"
    if status == 403:
        return "the token may not write there (403); expected one with the right to write"
    if isinstance(error, RevisionNotFoundError):
        return f"there is no branch {revision}"
    if status == 404:
        return (
            "there is no such model repository, or the token may not see it; --create makes a new "
            "one"
        )
    said = f": {_plain(error.server_message)}" if error.server_message else ""
    if status in _MAY_PASS:
        return f"the hub answered {status}, also when it was asked again{said}"
    return f"the hub refused the request ({status}){said}"


def _plain(text: str) -> str:
    line = _TOKEN.sub("hf_…", _URL.sub("URL", " ".join(text.split())))
    return line if len(line) <= _LONGEST else line[: _LONGEST - 1] + "…"
