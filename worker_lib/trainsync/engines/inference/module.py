"""New weights into a module of torch or transformers, in place."""

from collections.abc import ItemsView, Sequence
from dataclasses import replace

import torch
import xxhash

from trainsync.engines.inference.base import NamedTensors
from trainsync.weights.buckets.layout import TensorMeta, differences
from trainsync.weights.errors import SchemaMismatchError
from trainsync.weights.transports.base import meta_of


class ModuleEngine:
    """A plain module that is not sharded. Weights that do not fit change nothing.

    Names, shapes and dtypes must be those of the module's ``state_dict``. A weight that the module
    has under several names (tied ones) may come under any of them, or, with equal values, under
    several.

    Of weights that can be read twice (the items of a mapping, or a sequence) the engine holds one
    at a time: they are looked at first, and then copied. What comes once only is held whole.

    Args:
        module: any device; changed in place, so optimizers and compiled graphs stay good.
        cast: weights of another dtype than the module's are converted, instead of refused.
    """

    def __init__(self, module: torch.nn.Module, *, cast: bool = False) -> None:
        self.module = module
        self._cast = cast
        self._version = -1
        self._coming = -1

    @property
    def version(self) -> int:
        """What the module computes with; -1 before the first update, and after one that failed
        half-way, which leaves tensors of both versions."""
        return self._version

    def begin_update(self, version: int) -> None:
        """See `InferenceEngine`."""
        self._coming = version

    @torch.no_grad()
    def load_weights(self, weights: NamedTensors) -> None:
        """See `InferenceEngine`.

        Raises:
            SchemaMismatchError: they do not fit; names the first five differences. The module is as
                it was.
            Exception: what reading the weights raises. When that comes after all of them were
                looked at, the module may have some of the new ones: `version` is -1 then, and
                nothing may be computed with it before an update has succeeded.
        """
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
            targets[name].copy_(tensor)
        self._version = self._coming

    def _check_tied(self, tied: dict[str, list[str]], digests: dict[str, str]) -> None:
        """The last write would win, and the module would be no version that was ever trained."""
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
        # Of a tied weight any names that came will do; the first is missed if none has come.
        wanted = [
            name
            for name in targets
            if name in names
            or name not in tied
            or (tied[name][0] == name and names.isdisjoint(tied[name]))
        ]
        if self._cast:
            given = [
                replace(meta, dtype=own.dtype, itemsize=own.itemsize)
                if meta.name in targets
                and (own := meta_of(meta.name, targets[meta.name])).shape == meta.shape
                else meta
                for meta in given
            ]
        wrong = differences([meta_of(name, targets[name]) for name in wanted], given)
        if wrong is not None:
            raise SchemaMismatchError(f"version {self._coming}: {wrong}")


def _tied(targets: dict[str, torch.Tensor]) -> dict[str, list[str]]:
    """All names of each tensor that has several, by each of them."""
    groups: dict[object, list[str]] = {}
    for name, target in targets.items():
        place = target.untyped_storage().data_ptr() if target.device.type != "meta" else 0
        view = (place, target.storage_offset(), target.shape, target.stride(), target.dtype)
        groups.setdefault(view if place and target.numel() else id(target), []).append(name)
    return {name: group for group in groups.values() if len(group) > 1 for name in group}


def _digest(tensor: torch.Tensor, dtype: torch.dtype) -> str:
    """Of the bytes that the module would have of it."""
    raw = tensor.detach().to(dtype).contiguous().reshape(-1).view(torch.uint8).cpu()
    return xxhash.xxh3_128_hexdigest(raw.numpy().data)
