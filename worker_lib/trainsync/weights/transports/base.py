"""How an explorer gets the bytes of a version: one `WeightSource` for each method."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Protocol, runtime_checkable

import torch

from trainsync.weights.buckets.layout import TensorMeta, differences
from trainsync.weights.counts import TransferKind
from trainsync.weights.errors import SchemaMismatchError
from trainsync.weights.versions import Published


@dataclass(frozen=True)
class Weights:
    """Full tensors of one verified version, on the CPU unless a GPU was asked for.

    They may be read-only views into memory of the source: not to be written to, and valid until
    they are acknowledged, or the next version is fetched by the same explorer. Copy what is to
    live longer. Loading one tensor after the other takes the least memory.

    Attributes:
        bytes: that were fetched.
        seconds: that fetching took.
        taken: the bytes by the way that they came; empty where the trainer counts them.
        keepable: an engine may keep them: they stay valid until it has kept those of another
            version (`WeightSource.keep`).
        restarts: `Published.restarts` of the version; the client sets it.
    """

    version: int
    digest: str
    state_dict: Mapping[str, torch.Tensor]
    bytes: int
    seconds: float
    taken: Mapping[TransferKind, int] = field(default_factory=dict)
    keepable: bool = False
    restarts: int = 0


def meta_of(name: str, tensor: torch.Tensor) -> TensorMeta:
    """The description of a full tensor, on any device."""
    dtype = str(tensor.dtype).removeprefix("torch.")
    return TensorMeta(name, dtype, tensor.element_size(), tuple(tensor.shape))


def check_fit(
    version: int, expected: Sequence[TensorMeta] | None, offered: Sequence[TensorMeta]
) -> None:
    """Refuse weights that the model does not take; with ``expected`` None it takes anything.

    Raises:
        SchemaMismatchError: names the first five differences.
    """
    wrong = None if expected is None else differences(expected, offered)
    if wrong is not None:
        raise SchemaMismatchError(f"version {version}: {wrong}")


class LoadsWeights(Protocol):
    """Takes versions: an inference engine (see `trainsync.engines.inference.base`)."""

    def begin_update(self, version: int) -> None:
        """The tensors that come next are those of ``version``."""
        ...

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> object:
        """Take them; they are not valid after it has returned."""
        ...


@runtime_checkable
class KeepsWeights(LoadsWeights, Protocol):
    """An engine that can compute with the very tensors that came, instead of copies of them."""

    @property
    def keeps_weights(self) -> bool:
        """Whether `keep_weights` is to be called, where the tensors may be kept."""
        ...

    def keep_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> object:
        """As `load_weights`, but the tensors stay valid, and unchanged, until the next call has
        returned. Then no reference to them may be left."""
        ...


class WeightSource(ABC):
    """Brings versions to one explorer. One thread at a time."""

    pushed: ClassVar[bool] = False
    """Whether the trainer sends the bytes: then they may come later than their announcement."""

    @property
    def ready(self) -> bool:
        """Whether the next version can come: asked from any thread, answered at once."""
        return True

    def when_ready(self, tell: Callable[[], None]) -> None:  # noqa: B027 - most always are
        """Call ``tell``, which returns at once, whenever `ready` may have become true."""

    @property
    def refused(self) -> tuple[int, SchemaMismatchError] | None:
        """A version that was refused before it was published, and why: asked as `ready` is."""
        return None

    @abstractmethod
    def fetch(self, published: Published, timeout: float) -> Weights:
        """The verified bytes of a published version. What was fetched before is not valid any more.

        Raises:
            WeightsLateError: they did not come within ``timeout`` seconds, but still may.
            WeightsReplacedError: they are gone, because a newer version is about to be published,
                or was.
            WeightsUnavailableError: they cannot be fetched, or did not come in time.
            DigestMismatchError, InconsistentUploadError: what came is not what was published.
            SchemaMismatchError: it is not what the model takes, as far as that was said.
        """

    def release(self) -> None:  # noqa: B027 - most leave it to Python
        """Free the memory of the version fetched last, which is not read any more."""

    def keep(self) -> None:  # noqa: B027 - of those alone whose weights are keepable
        """Leave the version fetched last to the engine, until it keeps another one."""

    def copied(self, weights: Weights) -> None:  # noqa: B027 - most hold nothing
        """The engine has copied or kept ``weights``; they are not fetched again."""

    def stop(self) -> None:  # noqa: B027 - most follow no trainer
        """Follow the trainer no longer; what was fetched stays. Any thread; returns at once."""

    def close(self) -> None:  # noqa: B027 - most hold nothing
        """Let go of everything, within some seconds."""
