"""Copy a state into staged memory, so that the next optimizer step cannot change what is saved.

*Immediate* staging: nothing is held back, so when `begin` returns everything is free to change.
*Overlapped* staging: what is not held back is copied before `begin` returns; parameters and
moments, which change only in an optimizer's step, are copied by `Staging.copy` in another thread,
and the step waits for that (see `trainsync.checkpoint.save.staging.overlap`).
"""

import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch

from trainsync.checkpoint.errors import TornCopyError, UnsupportedStateError
from trainsync.checkpoint.save.staging.copy import Copy, copy_all
from trainsync.checkpoint.save.staging.pytree import Path, map_tensors, path_text
from trainsync.dist.sharded import is_dtensor

# torch.save aligns tensors in a file so; it also suits every dtype and vectorised copies.
_ALIGNMENT = 64

_Key = tuple[
    int, int | torch.SymInt, torch.Size, tuple[int, ...], torch.dtype, torch.device, bool, bool
]
Buffer = Callable[[int, bool], torch.Tensor]


@dataclass(frozen=True)
class StagedState:
    """A copy of a state that owns its bytes until its buffer is reused.

    Attributes:
        state: the copy, whose tensors lie in the buffer.
        bytes: that it takes there.
    """

    state: Any
    bytes: int


def begin(state: Any, buffer: Buffer, held_back: Callable[[torch.Tensor], bool]) -> "Staging":
    """Begin to copy ``state`` into one buffer, around which `Staging.result` rebuilds it.

    On return, all of it may change but what is held back. Tensors that are the same view of the
    same storage (tied weights) stay one tensor. DTensors keep their type, mesh and placements, and
    hold the copy of their local shard. Parameters become plain tensors. Strided tensors of every
    dtype and device are taken.

    Args:
        state: see `trainsync.checkpoint.save.staging.pytree.map_tensors`.
        buffer: gives a whole uint8 CPU tensor of at least so many bytes, pinned if the flag says
            so.
        held_back: whether this plain local tensor stays unchanged until `Staging.copy` is done
            (on an accelerator: before the stream that wants to has passed `Staging.order`).

    Raises:
        UnsupportedStateError: something that could not be saved or loaded.
    """
    plan = _Plan()
    skeleton = map_tensors(state, plan.add)
    return Staging(skeleton, plan, buffer(plan.bytes, plan.accelerated), held_back)


@dataclass(slots=True)
class _Placed:
    """A distinct local tensor as it was found, and where its copy goes in the buffer."""

    source: torch.Tensor
    offset: int
    bytes: int
    shape: torch.Size
    dtype: torch.dtype
    on_cpu: bool
    plain: bool  # whether its bytes are what is saved, in their order
    address: int = 0  # of a tensor that is copied later: where it was, and in which version
    version: int = 0
    storage: torch.UntypedStorage | None = None  # of that, where the copy reads

    def remember(self) -> None:
        self.address, self.version = self.source.data_ptr(), self.source._version
        # An edit through `.data` would free it while it is read.
        self.storage = self.source.untyped_storage()

    @property
    def unchanged(self) -> bool:
        return (self.address, self.version) == (self.source.data_ptr(), self.source._version)


class _Plan:
    """Where each distinct local tensor goes in the buffer."""

    def __init__(self) -> None:
        self.placed: list[_Placed] = []
        self.numbers: dict[int, int] = {}  # by id() of the caller's tensors, which outlive the plan
        self.bytes = 0
        self.accelerated = False
        self._numbers: dict[_Key, int] = {}

    def add(self, tensor: torch.Tensor, path: Path) -> torch.Tensor:
        local = _local(tensor, path)
        new = len(self.placed)
        number = self.numbers[id(tensor)] = self._numbers.setdefault(_key(local), new)
        if number == new:
            size, on_cpu = local.nbytes, local.device.type == "cpu"
            self.placed.append(
                _Placed(local, self.bytes, size, local.shape, local.dtype, on_cpu, _is_plain(local))
            )
            self.bytes += -(-size // _ALIGNMENT) * _ALIGNMENT
            self.accelerated = self.accelerated or not on_cpu
        return tensor


class Staging:
    """A copy that has begun. Call `copy` and `result` once, in one thread; `order` in any."""

    def __init__(
        self,
        skeleton: Any,
        plan: _Plan,
        memory: torch.Tensor,
        held_back: Callable[[torch.Tensor], bool],
    ) -> None:
        self.bytes = plan.bytes
        self._skeleton = skeleton
        self._numbers = plan.numbers
        self._placed = plan.placed
        assert memory.storage_offset() == 0, "a whole buffer, not a part of one"
        self._memory = memory
        self._events: list[torch.Event] = []  # all copies of devices
        self._ordering: list[tuple[torch.device, torch.Event]] = []  # those that a step must follow
        self._later: list[_Placed] = []  # held back, on the CPU
        self._on_device: list[_Placed] = []  # held back, elsewhere
        self._torn = False
        self._lock = threading.Lock()
        at_once: list[_Placed] = []
        elsewhere: list[_Placed] = []
        for placed in plan.placed:
            if placed.bytes and held_back(placed.source):
                placed.remember()
                (self._later if placed.on_cpu else elsewhere).append(placed)
            else:
                at_once.append(placed)
        try:
            with torch.no_grad():
                self._copy_elsewhere(elsewhere)
                self._copy_now(at_once, torch.get_num_threads())
        except BaseException:
            # No other object knows of the copies that have begun; the buffer goes to another save.
            self.settle()
            raise

    def order(self) -> None:
        """Let the current streams of the devices pass only after what is held back was copied.

        The host does not wait. What is held back on the CPU is `copy`'s.
        """
        with self._lock:
            self._torn = self._torn or not all(placed.unchanged for placed in self._on_device)
            self._on_device = []
        for device, event in self._ordering:
            torch.accelerator.current_stream(device).wait_event(event)

    def copy(self, threads: int) -> None:
        """Copy what is held back on the CPU.

        Raises:
            TornCopyError: it changed, or moved, though it should have been held back.
        """
        later, self._later = self._later, []
        self._check(later)
        with torch.no_grad():
            self._copy_now(later, threads)
        self._check(later)

    def result(self) -> StagedState:
        """Wait for the devices and give the copy; lets go of the caller's tensors.

        They may have changed since they were copied, also in shape.

        Raises:
            TornCopyError: see `copy`.
        """
        self.settle()
        with self._lock:  # what a step was let through to change may differ from now on
            if self._torn or not all(placed.unchanged for placed in self._on_device):
                raise _torn()

        copies: dict[int, torch.Tensor] = {}

        def copied(tensor: torch.Tensor, _: Path) -> torch.Tensor:
            number = self._numbers[id(tensor)]
            if number not in copies:
                copies[number] = self._target(self._placed[number])
            if is_dtensor(tensor):
                # from_local would move the copy to the mesh's device; the spec makes it a shard.
                return type(tensor)(copies[number], tensor._spec, requires_grad=False)
            return copies[number]

        staged = StagedState(map_tensors(self._skeleton, copied), self.bytes)
        self._skeleton, self._placed, self._on_device = None, [], []
        return staged

    def settle(self) -> None:
        """Wait until no device writes to the buffer any more: only then may it be reused."""
        for event in self._events:
            event.synchronize()

    def _copy_now(self, pieces: Iterable[_Placed], threads: int) -> None:
        plain: list[Copy] = []
        devices: set[torch.device] = set()
        base = self._memory.data_ptr()
        try:
            for placed in pieces:
                source = placed.source
                if placed.on_cpu and placed.plain:
                    if placed.bytes:
                        address = placed.address or source.data_ptr()
                        plain.append(Copy(base + placed.offset, address, placed.bytes))
                    continue
                if not placed.on_cpu:
                    devices.add(source.device)
                target = self._target(placed)
                # From a device: on the current stream, so before any later change of it.
                target.copy_(source, non_blocking=not placed.on_cpu)
            copy_all(plain, threads)
        finally:  # also of those that had begun when one failed
            for device in devices:
                event = torch.Event(device)
                event.record()
                self._events.append(event)

    def _copy_elsewhere(self, pieces: Iterable[_Placed]) -> None:
        """Start device copies beside the current streams, after what these have done so far."""
        streams: dict[torch.device, torch.Stream] = {}
        try:
            for placed in pieces:
                device = placed.source.device
                if device not in streams:
                    streams[device] = torch.Stream(device)
                    streams[device].wait_stream(torch.accelerator.current_stream(device))
                with streams[device]:
                    target = self._target(placed)
                    target.copy_(placed.source, non_blocking=True)
                self._on_device.append(placed)
        finally:  # also of those that had begun when one failed
            for device, stream in streams.items():
                event = torch.Event(device)
                event.record(stream)
                self._events.append(event)
                self._ordering.append((device, event))

    def _target(self, placed: _Placed) -> torch.Tensor:
        storage = _storage(self._memory.untyped_storage(), placed.offset, placed.bytes)
        return _tensor(placed.dtype, placed.shape, storage)

    @staticmethod
    def _check(pieces: Iterable[_Placed]) -> None:
        if not all(placed.unchanged for placed in pieces):
            raise _torn()


def _storage(memory: torch.UntypedStorage, offset: int, size: int) -> torch.UntypedStorage:
    """A part of ``memory``: torch.save writes whole storages."""
    if size == 0:
        # Not in the buffer: torch.save tells storages apart by address, and this one's would be
        # that of its neighbour.
        return torch.UntypedStorage(0)  # type: ignore[no-untyped-call]
    own: torch.UntypedStorage = memory[offset : offset + size]
    return own


def _tensor(dtype: torch.dtype, shape: torch.Size, storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=dtype).set_(storage, 0, shape, ())


def _torn() -> TornCopyError:
    return TornCopyError(
        "a parameter or moment was changed while it was copied, by something other than the step "
        "of a guarded optimizer; call wait_staged() before such a change"
    )


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether its bytes are what is saved, in their order."""
    return tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def _local(tensor: torch.Tensor, path: Path) -> torch.Tensor:
    """The tensor's own bytes on this rank; refuses what has none or is not a plain tensor."""
    if is_dtensor(tensor):
        tensor = tensor._local_tensor  # as to_local() without gradients, at a fraction of its time
    elif type(tensor) not in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer):
        raise UnsupportedStateError(
            f"{path_text(path)} is a {type(tensor).__name__}; expected a plain tensor or a DTensor"
        )
    if tensor.layout != torch.strided or tensor.is_quantized or tensor.device.type == "meta":
        what = "quantized" if tensor.is_quantized else f"{tensor.layout} on {tensor.device}"
        raise UnsupportedStateError(
            f"{path_text(path)} is {what}; expected a dense tensor with data"
        )
    return tensor


def _key(tensor: torch.Tensor) -> _Key:
    return (
        tensor.untyped_storage().data_ptr(),
        tensor.storage_offset(),
        tensor.shape,
        tensor.stride(),
        tensor.dtype,
        tensor.device,
        tensor.is_conj(),
        tensor.is_neg(),
    )
