"""The weights of a merge: put together from shards one at a time, as files have them."""

from collections.abc import Mapping
from typing import Any

import torch

from trainsync.checkpoint.errors import MergeError
from trainsync.checkpoint.load.reshard.read import ComponentRead, same_bytes
from trainsync.checkpoint.merge.lora import Adapter, BaseModel
from trainsync.checkpoint.merge.names import Names, check_complete, clean, tensor_names
from trainsync.checkpoint.merge.safetensors import TensorEntry


class MergedWeights:
    """Whole weights out of the shards of a model.

    Attributes:
        entries: what is to be written, in order.

    Args:
        dtype: of floating-point weights; None leaves each as it was saved.
        lora: rank and alpha of the adapter that was saved; None without one.
        base: what the adapter belongs to, where it was saved alone.

    Raises:
        MergeError: the state is not that of a model whose weights can be written.
    """

    def __init__(
        self,
        reading: ComponentRead,
        dtype: torch.dtype | None,
        lora: Mapping[str, Any] | None = None,
        base: BaseModel | None = None,
    ) -> None:
        self._reading = reading
        self._dtype = dtype
        self._base = base
        self._names = clean(tensor_names(reading.state))
        if base is not None:
            own = next((name for name in self._names if ".lora_" not in name), None)
            if own is not None:
                raise MergeError(
                    f"the checkpoint has weights of its own ({own}); expected no base, which is "
                    "for an adapter that was saved alone"
                )
            self._names |= {name: name for name in base.names}
        self._adapter = Adapter.of(self._names, lora)
        if self._adapter is not None:
            self._names = self._adapter.base
            for factors in self._adapter.factors.values():
                for name in (factors.down, factors.up):
                    self._want(name)
        self._expected: Names | None = None
        self._converted: set[str] = set()  # names of those that files hold in another way
        self._memory: torch.Tensor | None = None
        self._last: tuple[str, dict[str, torch.Tensor]] | None = None
        self.entries = [self._plan(name) for name in self._names]
        self._sources = {entry.name: entry for entry in self.entries}

    @property
    def paths(self) -> set[str]:
        """Files that are read."""
        return self._reading.paths

    def fit(self, expected: Names) -> None:
        """Let `entries` be those of files of a class, which may hold weights in another way.

        Raises:
            MergeError: some are missing.
        """
        check_complete(self._names, expected)
        self._expected = expected
        held, self.entries, self._sources = self.entries, [], {}
        for source in held:
            meta = torch.empty(source.shape, dtype=source.dtype, device="meta")
            made = expected.exported(source.name, meta)
            if list(made) != [source.name] or made[source.name] is not meta:
                self._converted.add(source.name)
            for name, tensor in made.items():
                if name in self._sources:
                    raise MergeError(
                        f"{source.name} and {self._sources[name].name} are both {name} in files"
                    )
                self._sources[name] = source
                self.entries.append(TensorEntry(name, tensor.dtype, tuple(tensor.shape)))

    def leave_out_tied(self) -> list[str]:
        """Take from `entries` the weights that transformers makes of other ones; their names.

        Raises:
            MergeError: one of them differs from the other one, or an adapter would make it so.
        """
        tied = []
        for name, source in ({} if self._expected is None else self._expected.tied).items():
            if name not in self._names or source not in self._names:
                continue
            changed = {} if self._adapter is None else self._adapter.factors
            if name in changed or source in changed:
                raise MergeError(
                    f"the LoRA adapter changes {name if name in changed else source}, which is one "
                    f"weight with {source if name in changed else name}; expected an adapter of "
                    "layers whose weights are their own"
                )
            one, other = self._whole(name), self._whole(source)
            if one.dtype != other.dtype or not same_bytes(one, other):
                raise MergeError(
                    f"{name} and {source} are one weight in the model's class and differ in the "
                    "checkpoint; expected tie_word_embeddings in config.json as in training"
                )
            tied.append(name)
        self.entries = [e for e in self.entries if self._sources[e.name].name not in tied]
        return tied

    def tensor(self, entry: TensorEntry) -> torch.Tensor:
        """One of `entries`. What it is cut from is kept for the next one, and nothing else: the
        tensor is good until another one is asked for."""
        source = self._sources[entry.name]
        if self._last is None or self._last[0] != source.name:
            self._last = None  # one at a time in memory
            whole = self._read(source)
            made = {source.name: whole}
            if source.name in self._converted:
                assert self._expected is not None, "it said so"
                made = self._expected.exported(source.name, whole)
            self._last = source.name, made
        return self._last[1][entry.name]

    def _read(self, source: TensorEntry) -> torch.Tensor:
        key = (self._names[source.name],)
        factors = None if self._adapter is None else self._adapter.factors.get(source.name)
        if self._adapter is None or factors is None:
            if self._base is not None:
                return self._base.tensor(source.name).to(source.dtype)
            return self._reading.tensor(key, into=self._room(source))
        down, up = (self._reading.tensor((name,)) for name in (factors.down, factors.up))
        return self._adapter.merged(self._whole(source.name), down, up).to(source.dtype)

    def _room(self, entry: TensorEntry) -> torch.Tensor:
        """Memory for it, the same for all: fresh memory costs more than what is done in it."""
        if self._memory is None:
            largest = max(source.bytes for source in self._sources.values())
            self._memory = torch.empty(largest, dtype=torch.uint8)
        return self._memory[: entry.bytes].view(entry.dtype).view(entry.shape)

    def _plan(self, name: str) -> TensorEntry:
        if self._base is not None:
            shape, dtype = self._base.shape(name), self._base.dtype(name)
        else:
            shape = self._want(self._names[name])
            dtype = self._reading.state[self._names[name]].dtype
        if self._dtype is not None and dtype.is_floating_point:
            dtype = self._dtype
        return TensorEntry(name, dtype, shape)

    def _want(self, name: str) -> tuple[int, ...]:
        """Plan to read all of a tensor of the state; its shape."""
        layout = self._reading.layout((name,), name)
        whole = tuple(((0, length),) if length else () for length in layout.shape)
        self._reading.want((name,), name, whole, replicated=True)
        return layout.shape

    def _whole(self, name: str) -> torch.Tensor:
        if self._base is not None:
            return self._base.tensor(name)
        return self._reading.tensor((self._names[name],))
