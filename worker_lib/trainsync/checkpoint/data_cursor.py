"""The data cursor beside rank 0's shard: a JSON file that the manifest names. Needs no torch."""

import json
from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

from trainsync.checkpoint.load.resume import Resume
from trainsync.checkpoint.shard_names import DATA_CURSOR_FILE
from trainsync.data.errors import DataMismatchError


@runtime_checkable
class HasState(Protocol):
    """Such as `trainsync.DataCursor`."""

    def state_dict(self) -> Mapping[str, Any]:
        """A state that JSON can hold."""
        ...


def data_cursor_file(cursor: HasState | Mapping[str, Any]) -> dict[str, bytes]:
    """The cursor's state as it is now, for ``attachments`` of `CheckpointCoordinator.save_async`.

    Args:
        cursor: a `trainsync.DataCursor`, another object whose ``state_dict()`` JSON can hold, or
            such a state itself, where another process holds the cursor.

    Returns:
        path relative to the folder of the shards → content.

    Raises:
        TypeError: it has no state, or one that JSON cannot hold.
    """
    state = cursor.state_dict() if isinstance(cursor, HasState) else cursor
    if not isinstance(state, Mapping):
        raise TypeError(
            f"data_cursor is a {type(cursor).__name__}; expected a trainsync.DataCursor, or a "
            "mapping of its state"
        )
    try:
        content = json.dumps(dict(state), allow_nan=False)
    except (TypeError, ValueError) as error:
        raise TypeError(
            f"data_cursor holds what JSON cannot: {error}; expected numbers, strings, lists and "
            "mappings by strings"
        ) from error
    return {DATA_CURSOR_FILE: content.encode()}


class LoadsState(Protocol):
    """A cursor that goes on from its saved state."""

    def load_state_dict(self, state: Mapping[str, Any], /) -> None:
        """Go on from ``state``."""
        ...


def restore_data_cursor(cursor: LoadsState, resume: Resume | None, subdir: str) -> None:
    """Let ``cursor`` go on from the checkpoint that is resumed from; None: it begins.

    Args:
        subdir: as given to the save.

    Raises:
        DataMismatchError: the checkpoint's cursor is of another dataset, or it has none.
        CorruptCheckpointError: the file is missing, or differs from the manifest.
    """
    if resume is None:
        return
    state = resume.data_cursor(subdir)
    if state is None:
        raise DataMismatchError(
            f"the checkpoint of step {resume.step} has no data cursor in {subdir!r}: it was "
            "saved without data_cursor=. To go on with all items anew, make the cursor "
            "yourself, such as a trainsync.DataCursor"
        )
    cursor.load_state_dict(state)
