"""New weights into a module of torch or transformers, in place."""

import logging
from collections.abc import ItemsView, Sequence
from dataclasses import replace

import torch
import xxhash

from trainsync.engines.inference.base import NamedTensors
from trainsync.weights.buckets.layout import TensorMeta, differences
from trainsync.weights.errors import SchemaMismatchError
from trainsync.weights.transports.base import meta_of

logger = logging.getLogger(__name__)


class ModuleEngine:
    """A module that is not sharded. Weights that do not fit are refused before any tensor changes.

    Names and shapes must be those of the module's ``state_dict``. A weight that the module
    has under several names (tied ones) may come under any of them, or, with equal values, under
    several.

    Weights that can be read twice (the items of a mapping, or a sequence) are checked in a first
    pass and copied in a second, one in memory at a time. Weights that can be read once are all held
    in memory.

    Args:
        module: on any device; changed in place, so optimizers and compiled graphs stay valid.
        in_place: False: parameters point to the memory that received the version, where possible
            (method ``nccl``, from another host), and no tensor is copied: an explorer then needs
            memory for two models instead of three. Parameters stay the same objects and move at
            each update, so keep no CUDA graph and no view of them, and never write to them. Buffers
            are still copied.
        cast: floating-point weights are converted to the module's dtype, and the first conversion
            is logged; False: they are refused. Other weights must have the module's dtype.
    """

    def __init__(
        self, module: torch.nn.Module, *, cast: bool = True, in_place: bool = True
    ) -> None:
        self.module = module
        self.keeps_weights = not in_place
        self._cast = cast
        self._version = -1
        self._coming = -1
        self._cast_told = False

    @property
    def version(self) -> int:
        """The version of the module's weights; -1 before the first update, and after an update that
        failed half-way and left tensors of two versions."""
        return self._version

    def begin_update(self, version: int) -> None:
        """See `InferenceEngine`."""
        self._coming = version

    @torch.no_grad()
    def load_weights(self, weights: NamedTensors) -> None:
        """See `InferenceEngine`.

        Raises:
            SchemaMismatchError: the weights do not fit; names the first five differences. The
                module is unchanged.
            Exception: raised by the iterator of weights. If raised in the second pass, the module
                may hold some of the new weights: `version` is then -1, and the module must not be
                used before an update succeeds.
        """
        self._load(weights, keep=False)

    @torch.no_grad()
    def keep_weights(self, weights: NamedTensors) -> None:
        """See `trainsync.weights.transports.base.KeepsWeights`. Raises as `load_weights` does."""
        self._load(weights, keep=True)

    def _load(self, weights: NamedTensors, *, keep: bool) -> None:
        offered = weights if isinstance(weights, ItemsView | Sequence) else list(weights)
        state = self.module.state_dict(keep_vars=True)
        targets = {n: value for n, value in state.items() if isinstance(value, torch.Tensor)}
        tied = _tied(targets)
        metas: list[TensorMeta] = []
        digests: dict[str, str] = {}
        for name, tensor in offered:
            metas.append(meta_of(name, tensor))
            if name in tied:
                digests[name] = _digest(tensor, targets[name].dtype)
        self._check(metas, targets, tied)
        self._check_tied(tied, digests)
        self._version = -1
        for name, tensor in offered:
            if keep and _may_be(targets[name], tensor):
                targets[name].data = tensor
            else:
                targets[name].copy_(tensor)
        self._version = self._coming

    def _check_tied(self, tied: dict[str, list[str]], digests: dict[str, str]) -> None:
        """Refuse tied weights with unequal values: the last write would win, which mixes
        versions."""
        for name, digest in digests.items():
            for other in tied[name]:
                if digests.get(other, digest) != digest:
                    raise SchemaMismatchError(
                        f"version {self._coming}: {name} and {other} are one tensor in this "
                        "module, and come with different values; expected equal ones"
                    )

    def _check(
        self,
        given: list[TensorMeta],
        targets: dict[str, torch.Tensor],
        tied: dict[str, list[str]],
    ) -> None:
        names = {meta.name for meta in given}
        # A tied weight may come under any of its names; if none came, report the first as missing.
        wanted = [
            name
            for name in targets
            if name in names
            or name not in tied
            or (tied[name][0] == name and names.isdisjoint(tied[name]))
        ]
        came = given
        if self._cast:
            given = [
                _as_own(meta, targets[meta.name]) if meta.name in targets else meta
                for meta in given
            ]
        wrong = differences([meta_of(name, targets[name]) for name in wanted], given)
        if wrong is not None:
            raise SchemaMismatchError(f"version {self._coming}: {wrong}")
        converted = [
            (one, own) for one, own in zip(came, given, strict=True) if one.dtype != own.dtype
        ]
        if converted and not self._cast_told:
            self._cast_told = True  # once, not with every version
            (first, own), size = converted[0], sum(one.size for one, _ in converted)
            logger.info(
                "version %d: %d weights (%d bytes) are converted as they are loaded, such as %s "
                "from %s to %s; a narrower one can travel: WeightPublisher(dtype=...)",
                self._coming,
                len(converted),
                size,
                first.name,
                first.dtype,
                own.dtype,
            )


def _may_be(target: torch.Tensor, tensor: torch.Tensor) -> bool:
    """Whether the parameter can alias the received tensor; a tensor the module writes to cannot."""
    return (
        isinstance(target, torch.nn.Parameter)
        and target.dtype == tensor.dtype
        and target.device == tensor.device
    )


def _as_own(meta: TensorMeta, target: torch.Tensor) -> TensorMeta:
    """``meta`` with the dtype of ``target``, if both are floating-point."""
    own = meta_of(meta.name, target)
    given = getattr(torch, meta.dtype, None)
    floating = isinstance(given, torch.dtype) and given.is_floating_point
    if not floating or not target.is_floating_point():
        return meta
    return replace(meta, dtype=own.dtype, itemsize=own.itemsize)


def _tied(targets: dict[str, torch.Tensor]) -> dict[str, list[str]]:
    """For each name of a tied tensor, all names of that tensor."""
    groups: dict[object, list[str]] = {}
    for name, target in targets.items():
        place = target.untyped_storage().data_ptr() if target.device.type != "meta" else 0
        view = (place, target.storage_offset(), target.shape, target.stride(), target.dtype)
        groups.setdefault(view if place and target.numel() else id(target), []).append(name)
    return {name: group for group in groups.values() if len(group) > 1 for name in group}


def _digest(tensor: torch.Tensor, dtype: torch.dtype) -> str:
    """Digest of the weight's bytes after conversion to the module's dtype."""
    raw = tensor.detach().to(dtype).contiguous().reshape(-1).view(torch.uint8).cpu()
    return xxhash.xxh3_128_hexdigest(raw.numpy().data)
