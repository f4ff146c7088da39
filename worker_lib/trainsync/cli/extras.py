"""Imports of what only some commands need: all others work without these packages."""

import importlib
from types import ModuleType

from trainsync.cli.output.console import fail


def import_extra(module: str, command: str, extra: str) -> ModuleType:
    """The module; ends the command, which needs the extra, where a package of it is missing."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        missing = error.name or "a package"
        if missing.startswith("trainsync"):
            raise
        fail(
            f"{command} needs {missing}, which is not installed: in a clone of trainsync, "
            f"pip install '.[{extra}]'"
        )
