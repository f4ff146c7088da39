"""Strings from elsewhere, made harmless for a terminal."""

import re
from typing import Final

from rich.text import Text

from trainsync.api.words import clean

_COLOURS: Final = re.compile(r"\x1b\[[0-9;:]*m")


def log_line(text: str) -> str:
    """A line of a log: without colours, of a progress bar only its last state, and `clean`."""
    plain = _COLOURS.sub("", text.rstrip("\r\n"))
    return clean(plain.rsplit("\r", 1)[-1])


def cell(value: object, style: str = "") -> Text:
    """For a table: cleaned, on one line, and never read as markup."""
    return Text(" ".join(clean(str(value)).split()), style=style)
