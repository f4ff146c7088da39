"""The directory that a merge makes: it appears when it is complete, and never replaces anything."""

import errno
import json
import os
from pathlib import Path

import torch
from rich.filesize import decimal

from trainsync.checkpoint.errors import MergeError
from trainsync.storage import atomic


def check_output(run: Path, output: Path) -> None:
    """Refuse a place that has something in it, or is in the run's directory ``run``.

    Raises:
        MergeError: says what was expected.
    """
    if output.resolve().is_relative_to(run.resolve()):
        raise MergeError(
            f"{output} is inside the run's directory {run}; expected a place outside it"
        )
    if output.is_symlink() or (output.exists() and not output.is_dir()):
        raise MergeError(f"{output} is not a directory; expected a new one, or an empty one")
    if output.exists() and any(output.iterdir()):
        raise MergeError(f"{output} is not empty; expected a new directory, or an empty one")


def check_room(folder: Path, needed: int, what: str) -> None:
    """Refuse to begin what the file system of ``folder`` has no room for.

    Raises:
        MergeError: says how much is needed, and how much is free.
        OSError: it cannot be asked.
    """
    found = os.statvfs(folder)
    if not found.f_blocks:
        return  # a file system that does not know its size
    free = found.f_bavail * found.f_frsize
    if needed > free:
        raise MergeError(
            f"{what} need {decimal(needed)}, and the file system of {folder} has {decimal(free)} "
            "free; expected a place with more room"
        )


def make_durable(folder: Path) -> None:
    """Put everything in ``folder`` on the disk. Raises `OSError`."""
    for path in [*folder.rglob("*"), folder]:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


def publish(temporary: Path, output: Path) -> None:
    """Give a complete directory its name.

    Raises:
        MergeError: something is there by now.
        OSError: the disk failed.
    """
    try:
        temporary.rename(output)
    except OSError as error:
        if error.errno in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
            raise MergeError(f"{output} was made by another process meanwhile") from error
        raise
    atomic.fsync_directory(output.parent)


def say_dtype(config: Path, floating: set[torch.dtype]) -> None:
    """Let the configuration say what the files hold: transformers loads weights as it says."""
    try:
        content = json.loads(config.read_bytes())
        if not isinstance(content, dict):
            raise ValueError("it is not an object")
    except ValueError as error:
        raise MergeError(f"the model's config.json cannot be read: {error}") from error
    if len(floating) == 1:
        content.pop("torch_dtype", None)  # as older versions call it
        content["dtype"] = str(floating.pop()).removeprefix("torch.")
    config.write_text(json.dumps(content, indent=2) + "\n")
