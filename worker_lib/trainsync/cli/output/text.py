"""Strings from elsewhere, made harmless for a terminal."""

from rich.text import Text

from trainsync.api.words import clean


def cell(value: object, style: str = "") -> Text:
    """For a table: cleaned, on one line, and never read as markup."""
    return Text(" ".join(clean(str(value)).split()), style=style)
