"""The run's directory is shared by users of one group: trainers write, the monitor cleans up."""

import logging
import os
import stat
from pathlib import Path
from typing import Final

from trainsync.storage.atomic import DIRECTORY_MODE, make_directory
from trainsync.storage.layout import RunDirectory

_LOG = logging.getLogger(__name__)
_GROUP: Final = stat.S_IRWXG


def open_to_group(run: RunDirectory) -> None:
    """Give the group its rights on directories that this user left in staging and in the trash.

    A function that saves may make directories as the umask has them, and be killed before they are
    taken over. Then only their owner can delete what is in them, and the monitor is another
    user. What cannot be changed is logged: it keeps space, and breaks nothing.
    """
    try:
        for base in (run.staging, run.trash):
            for place, names, _ in os.walk(base):
                for name in names:
                    _open_one(Path(place, name))
    except OSError as error:
        _LOG.warning("directories that an earlier process left stay closed to the group: %s", error)


def _open_one(path: Path) -> None:
    try:
        info = path.lstat()
        closed = stat.S_ISDIR(info.st_mode) and info.st_mode & _GROUP != _GROUP
        if not closed or info.st_uid != os.geteuid():
            return
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except FileNotFoundError:
        return  # the monitor deletes meanwhile
    try:
        os.fchmod(fd, DIRECTORY_MODE)
    finally:
        os.close(fd)


def open_step(run: RunDirectory, step: int) -> None:
    """Make the directory of a step, if it is missing, and see that the group may write there.

    For a program that would make it as the umask has it: under 022 the monitor, which is another
    user, could not move the step's files to it. One that this user made so before is opened.

    Raises:
        OSError, UnsafePathError: see `trainsync.storage.atomic.make_directory`.
    """
    directory = run.step(step)
    make_directory(directory)
    _open_one(directory)
