"""Restores the state beside model and optimizer: reads and checks all of it, then applies it."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from trainsync.checkpoint import training_state as keys
from trainsync.checkpoint.errors import CorruptCheckpointError, StateMismatchError
from trainsync.checkpoint.load.reshard.files import ShardFiles
from trainsync.checkpoint.load.reshard.shard_files import Component
from trainsync.checkpoint.training_state import LiveState

Combine = Callable[[Sequence[Any]], Any]


class StateLoad:
    """One rank's `training_state`.

    Where as many ranks load as saved, each gets its own. Else all get rank 0's scheduler and
    ``extra``; random numbers start anew, and the states of dataloaders are put together by
    ``combine``.

    Attributes:
        restored, not_restored, extra: as in `trainsync.checkpoint.load.loading.Loaded`.

    Args:
        files: those of the step.
        component: None when the checkpoint has none.

    Raises:
        StateMismatchError: the checkpoint has no state that is asked for.
    """

    def __init__(
        self,
        files: ShardFiles,
        component: Component | None,
        live: LiveState,
        rank: int,
        world_size: int,
        *,
        rng: bool,
        combine: Combine | None,
    ) -> None:
        self.paths: set[str] = set()
        self.restored: list[str] = []
        self.not_restored: dict[str, str] = {}
        self.extra: dict[str, Any] = {}
        self._files = files
        self._component = component
        self._live = live
        self._rng = rng
        self._combine = combine
        self._state: dict[str, Any] = {}
        if component is None:
            self._refuse_without()
            return
        component.home(rank, world_size)  # raises when a file is missing
        self._own = component.is_saved_by(rank, world_size)
        self._path = component.path(rank if self._own else 0)
        self.paths.add(self._path)
        if not self._own and live.dataloader is not None:
            if combine is None:
                raise StateMismatchError(
                    f"the dataloader's state was saved by {self._who(component)} and cannot go on "
                    f"in rank {rank} of {world_size}; expected as many ranks, or a function "
                    "combine_dataloaders= that makes one state of all theirs"
                )
            self.paths |= {component.path(other) for other in component.ranks}

    def read(self) -> None:
        """Read all of it; live objects stay as they are.

        Raises:
            StateMismatchError: a state that is to be restored was not saved.
            CorruptCheckpointError: the file is not a `training_state`.
        """
        if self._component is None:
            return
        self._state = self._load(self._path)
        self.extra = dict(self._state.get(keys.EXTRA) or {})
        self._settle("scheduler", keys.SCHEDULER, self._live.scheduler is not None)
        self._settle("dataloader", keys.DATALOADER, self._live.dataloader is not None)
        if "dataloader" in self.restored and not self._own:
            assert self._combine is not None
            everyone = [
                self._load(self._component.path(rank)).get(keys.DATALOADER)
                for rank in sorted(self._component.ranks)
            ]
            self._state[keys.DATALOADER] = self._combine(everyone)
        self._settle("generators", keys.GENERATORS, bool(self._live.generators))
        self._settle("rng", keys.RNG, self._rng and keys.RNG in self._state)
        if "generators" in self.restored:
            lacking = set(self._live.generators) - set(self._state[keys.GENERATORS])
            if lacking:
                raise StateMismatchError(
                    f"{self._path} has no generator {', '.join(sorted(lacking))}; it has "
                    + ", ".join(self._state[keys.GENERATORS])
                )
        if "rng" in self.restored:
            keys.check_rng_state(self._state[keys.RNG])
        for name in ("generators", "rng"):
            if name in self.restored and not self._own:
                self.restored.remove(name)
                self.not_restored[name] = (
                    f"it was saved by {self._who(self._component)}, each with its own"
                )

    def apply(self) -> None:
        """Change the live objects; random numbers last, since the other steps may draw some."""
        live, state = self._live, self._state
        if "scheduler" in self.restored and live.scheduler is not None:
            live.scheduler.load_state_dict(state[keys.SCHEDULER])
        if "dataloader" in self.restored and live.dataloader is not None:
            live.dataloader.load_state_dict(state[keys.DATALOADER])
        if "generators" in self.restored:
            for name, generator in live.generators.items():
                generator.set_state(state[keys.GENERATORS][name])
        if "rng" in self.restored:
            for kind in keys.set_rng_state(state[keys.RNG]):
                self.not_restored[f"rng of {kind}"] = "this process uses no such accelerator"
        self._state = {}

    # -- inside -----------------------------------------------------------------------------

    def _settle(self, name: str, key: str, wanted: bool) -> None:
        saved = self._state.get(key) is not None
        if wanted and not saved:
            raise StateMismatchError(
                f"{self._path} has no {key}; expected a state saved with "
                f"training_state({name}=…), or none to be asked for"
            )
        if wanted:
            self.restored.append(name)
        elif saved:
            self.not_restored[name] = "it was saved, and not asked for"
        elif name == "rng":
            self.not_restored[name] = "it was not saved"

    def _refuse_without(self) -> None:
        live = self._live
        asked = {
            "scheduler": live.scheduler is not None,
            "dataloader": live.dataloader is not None,
            "generators": bool(live.generators),
        }
        for name, wanted in asked.items():
            if wanted:
                raise StateMismatchError(
                    f"the checkpoint has no component extra_state, so no {name}; expected "
                    f'save_async("extra_state", training_state({name}=…), step) at every save'
                )
        self.not_restored["rng"] = "the checkpoint has no component extra_state"

    def _load(self, path: str) -> dict[str, Any]:
        state = self._files.load(path)
        if not isinstance(state, Mapping):
            raise CorruptCheckpointError(
                f"{path} holds a {type(state).__name__}; expected what training_state() returns"
            )
        return dict(state)

    @staticmethod
    def _who(component: Component) -> str:
        if component.one_for_all and component.world_size > 1:
            return f"rank 0 of {component.world_size}"
        return f"{component.world_size} ranks" if component.world_size > 1 else "1 rank"
