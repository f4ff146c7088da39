"""The name that a server gives its weights: ``VERSION``, or ``VERSION-`` and 16 digits of a digest.

With the digest, two versions of one number are told apart: those of a step that was trained again.
"""

import re
from typing import Final

DISCARDED: Final = "discarded"
"""Of weights whose memory was given up while the server slept."""

_DIGITS: Final = 16
_TAG: Final = re.compile(rf"(0|[1-9][0-9]*)(?:-[0-9a-f]{{{_DIGITS}}})?")


def tag_of(version: int, digest: str) -> str:
    """The name of a version.

    Args:
        digest: ``<algorithm>:<hex>``, of at least 16 digits.
    """
    return f"{version}-{digest.rpartition(':')[2][:_DIGITS]}"


def version_in(tag: str) -> int | None:
    """The version that a name is of; None: the weights are not of a trainer."""
    match = _TAG.fullmatch(tag)
    return int(match[1]) if match else None
