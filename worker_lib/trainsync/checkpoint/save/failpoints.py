"""Points of a save where a test may kill the process, or make it fail."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

WRITE_PHASES: Final = (
    "staged",
    "granted",
    "opened",
    "written",
    "fsynced",
    "renamed",
    "receipt",
    "told",
)
"""In the order of a save: the bytes are copied; the permit to write is held; a temporary file
exists; its bytes are handed to the system; they are on disk; the file has its name; the receipt is
on disk; the monitor knows. ``opened`` to ``renamed`` come once for every file of the save, also of
one that a function writes."""


@dataclass(frozen=True)
class WriteHooks:
    """Called on the way; tests kill the process or raise here.

    ``phase`` is told each of `WRITE_PHASES` as it is reached, in the thread that reached it. What
    it raises fails the save as an error of that phase would.
    """

    phase: Callable[[str], None] = lambda _: None
