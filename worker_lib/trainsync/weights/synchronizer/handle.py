"""The Synchronizer's handle as `RunContext.synchronizer` gives it to trainers. No Ray."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class SynchronizerHandle:
    """An actor handle that also says for which trainers it was made. It may be pickled.

    Methods of the actor are called as of Ray's handle: ``handle.get_status.remote()``. A
    `SynchronizerConnection` that is made of it says in each call of a trainer after which restart
    in place that one was made, however late the connection is made; the Synchronizer refuses those
    of trainers that others replaced. It also finds an actor that was built again before the
    connection was made.

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
        return getattr(self.actor, method)
