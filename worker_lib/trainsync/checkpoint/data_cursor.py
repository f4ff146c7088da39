"""The data cursor beside rank 0's shard: a JSON file that the manifest names. Needs no torch."""

import json
from collections.abc import Mapping
from typing import Any, Final, Protocol, runtime_checkable

DATA_CURSOR_FILE: Final = "data_cursor.json"


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
