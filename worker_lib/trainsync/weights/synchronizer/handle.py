"""The Synchronizer's handle as `RunContext.synchronizer` gives it to trainers. No Ray."""

from dataclasses import dataclass
from typing import Any, Final

FENCED: Final = frozenset(
    {
        "set_model_state_dict",
        "make_room",
        "announce",
        "note_missed",
        "setup_weight_sync_group",
        "ready_to_nccl_sync",
        "set_trainer_status",
        "next_trainer_task",
        "begin_step",
        "end_step",
        "note_aborted",
        "finish_pace",
    }
)
"""Methods that the actor takes of trainers of the present restart only."""


@dataclass(frozen=True)
class SynchronizerHandle:
    """An actor handle that also says for which trainers it was made. It may be pickled.

    Methods of the actor are called as of Ray's handle: ``handle.get_status.remote()``. Each call of
    a trainer says after which restart in place the handle was made; the Synchronizer refuses those
    of trainers that others replaced. A `SynchronizerConnection` that is made of it also finds an
    actor that was built again.

    Attributes:
        actor: Ray's handle.
        namespace: Ray namespace of the actor, which is rebuilt when it dies.
        restarts: in place, that came before the trainers that the handle was made for.
    """

    actor: Any
    namespace: str
    restarts: int

    def __getattr__(self, method: str) -> Any:
        if "actor" not in self.__dict__:  # while it is unpickled
            raise AttributeError(method)
        found = getattr(self.actor, method)
        return _FencedMethod(found, self.restarts) if method in FENCED else found


@dataclass(frozen=True)
class _FencedMethod:
    method: Any
    restarts: int

    def remote(self, *arguments: Any, **more: Any) -> Any:
        return self.method.remote(*arguments, **{"restarts": self.restarts, **more})
