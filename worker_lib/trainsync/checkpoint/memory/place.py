"""Where the processes of a pod keep shard files in memory, and whether that place may be used."""

import hashlib
import os
import re
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self

from trainsync.storage.digest import ALGORITHM
from trainsync.storage.objects.address import is_url

DEFAULT_MEMORY: Final = Path("/dev/shm")  # noqa: S108 - a directory of this user below it
_KEY_DIGITS: Final = 32
_GUESTS: Final = "guests"
_NAME: Final = re.compile(
    r"(?P<step>[0-9]{1,19})-(?P<attempt>[0-9]{1,19})-(?P<incarnation>[a-z0-9]{8,32})"
    r"-(?P<part>[a-z0-9_]{1,64}-[0-9]{1,9})"
    r"-(?:(?P<state>writing|spare)-[0-9a-f]{16}|(?P<digest>[0-9a-f]{32}))"
)


@dataclass(frozen=True)
class MemoryPlace:
    """The directory of one run in a memory file system, shared by the processes of a pod.

    Attributes:
        directory: of this user alone; its parent, too.
        budget: bytes that all of them may keep there.
        shared: the run's directory on the volume, or the URL of its store, where a neighbour has
            copies of the files; None: there are no copies.
    """

    directory: Path
    budget: int
    shared: str | Path | None = None

    @classmethod
    def of_run(
        cls, memory: Path, budget: int, uid: str, checkpoints: str | Path, copies: int = 0
    ) -> Self:
        """The place of a run.

        Args:
            memory: where the memory file system is mounted.
            budget: of all that lies there. With copies a half of it is for those of a neighbour.
            uid: of the run.
            checkpoints: the run's directory on the volume, or the URL of its store, by which local
                runs are told apart.
            copies: of each file, with a neighbour: 0 or 1.
        """
        where = checkpoints if is_url(checkpoints) else os.path.realpath(checkpoints)
        identity = f"{uid}\n{where}".encode()
        key = hashlib.sha256(identity).hexdigest()[:_KEY_DIGITS]
        directory = memory / f"trainsync-{os.geteuid()}" / key
        return cls(directory, budget // (1 + copies), checkpoints if copies else None)

    @property
    def guests(self) -> "MemoryPlace | None":
        """Where a neighbour's files lie, with as many bytes; None without copies."""
        if self.shared is None:
            return None
        return MemoryPlace(self.directory / _GUESTS, self.budget)

    def make(self) -> None:
        """Make the directory, if it is not there.

        Raises:
            OSError: it cannot be made, or is not this user's alone.
        """
        for directory in (self.directory.parent, self.directory):
            try:
                directory.mkdir(mode=0o700)
            except FileExistsError:
                _check_own(directory)

    def files(self) -> Iterator["KeptName"]:
        """Files that are kept or being written; none where there is no such directory.

        Raises:
            OSError: the directory is not this user's alone.
        """
        try:
            for directory in (self.directory.parent, self.directory):
                _check_own(directory)
            names = [path.name for path in self.directory.iterdir()]
        except FileNotFoundError:
            return
        for name in names:
            kept = KeptName.parse(name)
            if kept is not None:
                yield kept

    def path(self, kept: "KeptName") -> Path:
        """Path of a file."""
        return self.directory / kept.name


@dataclass(frozen=True)
class KeptName:
    """The name of a file in memory: what was to be kept, by which process.

    Attributes:
        digest: of its bytes, as in a manifest; None while it is written, and of a spare file.
        part: its component and rank.
        is_spare: it was dropped, and waits for the next file of its part to take its memory.
    """

    name: str
    step: int
    attempt: int
    incarnation: str
    digest: str | None
    part: str
    is_spare: bool = False

    @classmethod
    def parse(cls, name: str) -> Self | None:
        """None for a name that is none of ours."""
        found = _NAME.fullmatch(name)
        if found is None:
            return None
        digest = found["digest"]
        return cls(
            name,
            int(found["step"]),
            int(found["attempt"]),
            found["incarnation"],
            None if digest is None else f"{ALGORITHM}:{digest}",
            found["part"],
            found["state"] == "spare",
        )


def _check_own(directory: Path) -> None:
    found = directory.lstat()
    if not stat.S_ISDIR(found.st_mode):
        raise NotADirectoryError(f"{directory} is not a directory")
    if found.st_uid != os.geteuid() or found.st_mode & 0o077:
        raise PermissionError(
            f"{directory} has owner {found.st_uid} and mode {stat.S_IMODE(found.st_mode):o}; "
            f"expected owner {os.geteuid()} and no rights for others"
        )
