"""Copies that go on behind the trainer's back until an optimizer wants to step.

A parameter, and an optimizer's state, change only in the optimizer's step. So a save may return at
once and copy them while the next forward and backward pass run, if the step waits for the copy.
"""

import threading
import time
import weakref
from typing import Any

import torch

from trainsync.checkpoint.errors import SaveTimeoutError
from trainsync.checkpoint.save.staging.staging import StagedState, Staging
from trainsync.dist.sharded import is_dtensor

_Place = tuple[torch.device, int]


class PendingCopy:
    """One save's copy that is going on. `run` belongs to one thread, the rest to any."""

    def __init__(self, staging: Staging) -> None:
        self._staging = staging
        self._lock = threading.Lock()
        self._done = threading.Event()
        self._overrun = False
        self._held_since: float | None = None
        self.held_seconds = 0.0
        """How long a step stood still for it; final when `run` has returned."""

    def run(self, threads: int) -> StagedState:
        """Copy, let the steps go on, give the copy.

        Raises:
            TornCopyError: something else than a guarded step changed what was copied.
            SaveTimeoutError: a step did not wait any longer, and may have changed it.
        """
        try:
            self._staging.copy(threads)
        finally:
            self.end()
        if self._overrun:
            raise SaveTimeoutError("the copy took longer than an optimizer may wait")
        return self._staging.result()

    def end(self) -> None:
        """Let steps go on; `run` does this itself."""
        with self._lock:
            if not self._done.is_set() and self._held_since is not None:
                self.held_seconds = time.monotonic() - self._held_since
            self._done.set()

    def settle(self) -> None:
        """See `Staging.settle`."""
        self._staging.settle()

    def hold(self, timeout: float) -> None:
        """Return when what was held back may change; after ``timeout`` seconds the save fails."""
        self._staging.order()
        with self._lock:
            if self._held_since is None:
                self._held_since = time.monotonic()
        if self._done.wait(timeout):
            return
        with self._lock:
            self._overrun = self._overrun or not self._done.is_set()

    def wait(self, timeout: float | None) -> bool:
        """Whether it is done within ``timeout`` seconds; the save goes on if not."""
        self._staging.order()
        return self._done.wait(timeout)


class Guards:
    """The optimizers that wait, what they own, and the copies that they wait for.

    Args:
        timeout: seconds that a step waits at most; then the save fails and the step goes on.
    """

    def __init__(self, timeout: float) -> None:
        self._timeout = timeout
        # An optimizer that the trainer has dropped owns nothing any more.
        self._optimizers: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        self._pending: list[PendingCopy] = []
        self._lock = threading.Lock()

    def add(self, optimizer: torch.optim.Optimizer) -> None:
        """Make every step of ``optimizer`` wait for the copies that are going on then."""
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise TypeError(
                f"expected a torch.optim.Optimizer, got a {type(optimizer).__name__}; of a "
                "wrapper, give the optimizer inside"
            )
        if optimizer in self._optimizers:
            return
        optimizer.register_step_pre_hook(self._before_step)
        self._optimizers.add(optimizer)

    def __bool__(self) -> bool:
        return len(self._optimizers) > 0

    def owned(self) -> "OptimizerMemory":
        """The tensors that the optimizers own now."""
        return OptimizerMemory(list(self._optimizers))

    def begin(self, staging: Staging) -> PendingCopy:
        """Make steps wait for ``staging`` until it is done."""
        pending = PendingCopy(staging)
        with self._lock:
            self._pending.append(pending)
        return pending

    def end(self, pending: PendingCopy) -> None:
        """The copy is done, or given up; called exactly once for each `begin`.

        When it returns, the buffer may be reused.
        """
        pending.end()
        pending.settle()
        with self._lock:
            self._pending.remove(pending)

    def wait(self, timeout: float | None) -> bool:
        """Whether everything that is going on now is copied within ``timeout`` seconds."""
        deadline = None if timeout is None else time.monotonic() + timeout
        return all(
            pending.wait(None if deadline is None else max(0.0, deadline - time.monotonic()))
            for pending in self._now()
        )

    def _before_step(self, *_: Any) -> None:
        deadline = time.monotonic() + self._timeout
        for pending in self._now():
            pending.hold(max(0.0, deadline - time.monotonic()))

    def _now(self) -> list[PendingCopy]:
        with self._lock:
            return list(self._pending)


class OptimizerMemory:
    """Memory that changes only in a step: parameters and their state.

    Not what stands in ``param_groups``: schedulers write to it (a learning rate may be a tensor).
    """

    def __init__(self, optimizers: list[torch.optim.Optimizer]) -> None:
        self._extents: dict[_Place, int] = {}
        self._unseen = [state for optimizer in optimizers for state in optimizer.state.values()]
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    self._add(parameter)

    def __contains__(self, tensor: object) -> bool:
        """Whether all of a plain, local tensor lies in such memory; false when in doubt."""
        if not isinstance(tensor, torch.Tensor) or tensor.is_inference():
            return False
        extent = _extent(tensor)
        if not self._holds(tensor, extent):
            # Moments are twice as many as parameters: they are looked through when one is asked
            # for that is none, so not when a model alone is saved.
            self._see_state()
            return self._holds(tensor, extent)
        return True

    def _holds(self, tensor: torch.Tensor, extent: int) -> bool:
        held = self._extents.get((tensor.device, tensor.data_ptr()), 0)
        return held > 0 and extent <= held

    def _see_state(self) -> None:
        unseen, self._unseen = self._unseen, []
        for state in unseen:
            self._add_all(state)

    def _add_all(self, value: Any) -> None:
        if isinstance(value, torch.Tensor):
            self._add(value)
        elif isinstance(value, dict):
            for inner in value.values():
                self._add_all(inner)
        elif isinstance(value, list | tuple):
            for inner in value:
                self._add_all(inner)

    def _add(self, tensor: torch.Tensor) -> None:
        local = tensor._local_tensor if is_dtensor(tensor) else tensor
        if type(local) not in (torch.Tensor, torch.nn.Parameter) or local.layout != torch.strided:
            return
        extent = _extent(local)
        if extent == local.nbytes:  # else there are gaps, which may be another tensor's
            place = (local.device, local.data_ptr())
            self._extents[place] = max(extent, self._extents.get(place, 0))


def _extent(tensor: torch.Tensor) -> int:
    """Bytes from its first element to the end of its last."""
    if tensor.is_contiguous() or not tensor.numel():
        return tensor.nbytes
    last = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.element_size()
