"""Uploads a file while it is written, and takes its digests on the way."""

import time
from collections.abc import Callable
from contextlib import suppress
from typing import Final

from trainsync.checkpoint.errors import SaveAbandonedError
from trainsync.checkpoint.save import ending
from trainsync.checkpoint.save.files.stream import Digesting
from trainsync.storage import block_digests
from trainsync.storage.errors import StorageError
from trainsync.storage.objects import parts
from trainsync.storage.objects.live.upload import Upload
from trainsync.storage.saves.based import Blocks

ASK_SECONDS: Final = 30.0
"""Between two questions whether a save that is uploaded has ended; each is a request."""


class OpenSaveCheck:
    """Checks at intervals that the save is still open while its files are written. For one thread.

    Args:
        has_ended: asks the store or the volume whether the save has.
        every: seconds between two questions; None: `ASK_SECONDS`.
    """

    def __init__(self, has_ended: Callable[[], bool], every: float | None = None) -> None:
        self._has_ended = has_ended
        self._every = ASK_SECONDS if every is None else every
        self._asked = time.monotonic()

    def check(self) -> None:
        """Pass, as a rule at once.

        Raises:
            SaveAbandonedError: the process exits, and writes no longer.
            FileNotFoundError: the save has ended meanwhile.
        """
        if ending.over.is_set():
            raise SaveAbandonedError("the process exited before the part was written")
        if time.monotonic() - self._asked < self._every:
            return
        with suppress(StorageError):  # the upload itself tells of a store that is away
            if self._has_ended():
                raise FileNotFoundError("the save has ended while its files were written")
        self._asked = time.monotonic()


class DigestingUpload(Digesting):
    """Hands what is written to ``upload``.

    Args:
        own: the blocks of the file that are uploaded; None: all.
    """

    def __init__(self, upload: Upload, own: Blocks | None = None) -> None:
        super().__init__()
        self._upload = upload
        self._own = own
        self._blocks = block_digests.BlockHasher()

    def _pass_on(self, block: memoryview) -> None:
        self._blocks.update(block)
        if self._own is None:
            self._upload.write(block)
            return
        for part in parts.own_part(block, self.size, self._own):
            self._upload.write(part)

    def blocks(self) -> block_digests.BlockDigests | None:
        """Digests of their blocks; None: there is one block. Nothing is written any more."""
        return self._blocks.finish()
