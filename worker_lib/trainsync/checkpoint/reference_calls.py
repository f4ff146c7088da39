"""Calls as Trinity-RFT's `CheckpointCoordinator` takes them, where they can mean only one thing."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from trainsync.api.protocol import SaveKind
from trainsync.checkpoint.errors import CheckpointError, UnsupportedPlaceError
from trainsync.checkpoint.save.part import SaveFunction, State
from trainsync.checkpoint.save.registration import all_ranks
from trainsync.checkpoint.shard_names import parse_shard_file_name
from trainsync.storage.layout import RunDirectory

PlainFunction = Callable[[], object]
"""A ``save_fn`` that takes nothing."""

_Pairs = tuple[tuple[str, int], ...]

_COMPONENT: Final = "model"
"""The component of a save without a name: the reference saves no other one so."""


def name_first(
    name: Any, save_fn: Any, step: Any, is_state_dict: bool
) -> tuple[str, Any, Any, bool]:
    """The arguments of `save_sync` in their order, given as ``(name, save_fn, global_step, …)`` or,
    as the reference has it, as ``(save_fn, global_step, is_state_dict)``.

    Raises:
        TypeError: neither; says what was expected.
    """
    if callable(name) and isinstance(step, bool | None):
        name, save_fn, step, is_state_dict = None, name, save_fn, bool(step) or is_state_dict
    named = isinstance(name, str)
    if step is None or not (named or (name is None and save_fn is not None)):
        raise TypeError(
            f"save_sync got name={name!r}, save_fn={save_fn!r}, global_step={step!r}; expected "
            'save_sync("model", save_fn, global_step, is_state_dict=...)'
        )
    return _COMPONENT if name is None else name, save_fn, step, is_state_dict


def taking_a_directory(
    save_fn: SaveFunction | PlainFunction | State,
    run: RunDirectory | None,
    step: int,
    kind: SaveKind,
    subdir: str,
    rank: int,
    world_size: int,
) -> SaveFunction | State:
    """A function without arguments as one that writes into the directory it is given.

    It writes where the reference does, into ``global_step_N/<subdir>``: there its files named
    ``…_world_size_W_rank_R.pt`` of this rank, which no other rank writes, are this part's.

    Args:
        run: None: its checkpoints are in a store.

    Raises:
        UnsupportedPlaceError: a function without arguments, and no directory.
    """
    if isinstance(save_fn, Mapping):
        return save_fn
    act: Callable[..., object] = save_fn
    if not _takes_nothing(act):
        return act
    if run is None:
        raise UnsupportedPlaceError(
            "save_fn takes no argument, and would write into the run's directory, which a run "
            "whose checkpoints are in a store has not; expected save_fn(directory), or a state"
        )

    def write(directory: Path) -> None:
        place = run.step(step) / subdir
        if run.manifest(kind, step).exists():
            raise CheckpointError(
                f"{place} is of a committed step, and save_fn writes there; expected a save_fn "
                "that takes the directory to write into"
            )
        before = _shards(place, rank, world_size)
        act()
        after = _shards(place, rank, world_size)
        written = [name for name, state in after.items() if before.get(name) != state]
        if not written:
            raise CheckpointError(
                f"save_fn takes no argument and wrote no …_world_size_{world_size}_rank_{rank}.pt "
                f"into {place}; expected save_fn(directory), which writes into the directory it is "
                "given, or a state: save_async(name, state_dict, step)"
            )
        for name in written:
            (place / name).replace(directory / name)

    return write


def _takes_nothing(save_fn: Callable[..., object]) -> bool:
    try:
        signature = inspect.signature(save_fn)
    except (TypeError, ValueError):  # of C, which does not say
        return False
    try:
        signature.bind(Path())
    except TypeError:
        pass
    else:
        return False
    try:
        signature.bind()
    except TypeError:
        return False
    return True


def _shards(place: Path, rank: int, world_size: int) -> dict[str, tuple[int, int, int]]:
    """This rank's shards in ``place``, each with what changes when it is written."""
    if not place.is_dir():
        return {}
    found = {}
    for path in place.iterdir():
        named = parse_shard_file_name(path.name)
        if named is not None and named[1:] == (rank, world_size):
            status = path.stat()
            found[path.name] = (status.st_ino, status.st_size, status.st_mtime_ns)
    return found


class SavedNames:
    """The participants of a save, where the reference gives numbers of threads.

    Every rank saves the same components: those that this process saved in the step; of a driver,
    which saves nothing, ``model`` as the state dict, ``optim`` and ``extra_state`` beside.

    Args:
        world_size: of the coordinator; 1 may be a driver's, which knows no ranks.
    """

    def __init__(self, world_size: int) -> None:
        self._world_size = world_size
        self._last: dict[SaveKind, tuple[int, list[str]]] = {}

    def note(self, kind: SaveKind, step: int, name: str) -> None:
        """This process saves the component."""
        last, names = self._last.get(kind, (None, []))
        if last != step:
            names = []
        self._last[kind] = (step, names if name in names else [*names, name])

    def chosen(
        self,
        step: int,
        state_dict: _Pairs,
        checkpoint: _Pairs,
        state_dict_count: int,
        checkpoint_count: int,
    ) -> tuple[_Pairs, _Pairs]:
        """The participants of the step's state dict, and of its checkpoint, as given or counted.

        Args:
            state_dict_count: saves of all ranks together; 0 for none. So with ``checkpoint_count``.

        Raises:
            ValueError: both are given, or the numbers fit no participants; names the call that
                does.
        """
        if not (state_dict_count or checkpoint_count):
            return state_dict, checkpoint
        if state_dict or checkpoint:
            raise ValueError("there are participants and thread counts; expected one of them")
        names = {
            SaveKind.STATE_DICT: self._names(SaveKind.STATE_DICT, step, (_COMPONENT,)),
            SaveKind.CHECKPOINT: self._names(SaveKind.CHECKPOINT, step, ("optim", "extra_state")),
        }
        counts = {SaveKind.STATE_DICT: state_dict_count, SaveKind.CHECKPOINT: checkpoint_count}
        ranks = self._world_size
        if ranks == 1 and state_dict_count:
            ranks = max(1, state_dict_count // len(names[SaveKind.STATE_DICT]))
        for kind, count in counts.items():
            if count and count != ranks * len(names[kind]):
                raise ValueError(
                    f"{kind.value}_thread_count={count} is not {', '.join(names[kind])} of {ranks} "
                    f"ranks; expected {kind.value}_participants=all_ranks('model', ..., "
                    "world_size=...), which names the participants"
                )
        counted = (
            tuple(all_ranks(*names[kind], world_size=ranks)) if count else ()
            for kind, count in counts.items()
        )
        return next(counted), next(counted)

    def _names(self, kind: SaveKind, step: int, default: tuple[str, ...]) -> Sequence[str]:
        last, names = self._last.get(kind, (None, []))
        return names if last == step else default
