"""The cursors over a dataset that one process holds, which deal no item twice."""

from collections.abc import Callable
from typing import TYPE_CHECKING

from trainsync.checkpoint.data_cursor import restore_data_cursor

if TYPE_CHECKING:
    from trainsync.checkpoint.load.resume import Resume
    from trainsync.data.cursor import DataCursor
    from trainsync.data.places import BatchCursor


class DataCursors:
    """Makes cursors that go on from the checkpoint which the attempt resumes from.

    Args:
        resume: asks for that checkpoint; None: the run begins.
    """

    def __init__(self, resume: "Callable[[], Resume | None]") -> None:
        self._resume = resume
        self._keeps_batches = self._deals_items = False

    def of_items(
        self, length: int, epochs: int | None, shuffle: bool, seed: int, subdir: str
    ) -> "DataCursor":
        """See `RunContext.data_cursor`."""
        from trainsync.data.cursor import DataCursor

        self._deals_items = True
        self._check()
        cursor = DataCursor(length, epochs=epochs, shuffle=shuffle, seed=seed)
        restore_data_cursor(cursor, self._resume(), subdir)
        return cursor

    def of_batches(
        self,
        length: int,
        batch_size: int,
        epochs: int | None,
        shuffle: bool,
        seed: int,
        subdir: str,
    ) -> "BatchCursor":
        """See `RunContext.batch_cursor`."""
        from trainsync.data.places import BatchCursor, BatchOrder

        cursor = BatchCursor(BatchOrder(length, batch_size, epochs, shuffle, seed))
        restore_data_cursor(cursor, self._resume(), subdir)
        return cursor

    def keep_batches(self, keep: bool) -> None:
        """Whether the process's pace keeps batches over a restart in place.

        Raises:
            ValueError: it does, and a cursor of this process deals items.
        """
        self._keeps_batches = keep
        self._check()

    def _check(self) -> None:
        if self._keeps_batches and self._deals_items:
            raise ValueError(
                "keep_batches=True and a data cursor: after a restart in place the cursor would "
                "deal the items of the kept batches again; use ctx.batch_cursor, or leave "
                "keep_batches out"
            )
