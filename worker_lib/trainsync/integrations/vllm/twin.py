"""A second copy of a model's layers, loaded and processed while the first one serves.

The twin of a layer is an object of the same class with the same attributes, but with parameters and
buffers of its own, as vLLM recorded them for its layerwise reload. vLLM's own loaders and kernels
fill the twin as a reload would fill the layer.
"""

from collections.abc import Iterable, Iterator
from types import MethodType
from typing import Any, Final

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from vllm.lora.layers import BaseLayerWithLoRA
from vllm.model_executor.layers.attention import Attention, is_deferred_attention_layer
from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import (
    UnquantizedFusedMoEMethod,
)
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
from vllm.model_executor.model_loader.reload.meta import materialize_meta_tensor
from vllm.model_executor.model_loader.reload.sanitize import layer_ref_sentinel
from vllm.v1.attention.backend import AttentionImplBase

from trainsync.integrations.vllm.errors import UnpreparableError
from trainsync.integrations.vllm.replacement import Copy, Replacement, Swap, value_of
from trainsync.weights.proof.products import same_bytes

_PACK: Final = (UnquantizedLinearMethod, UnquantizedEmbeddingMethod)
_WRAPPER: Final = "online_process_loader"
_CALLED: Final = "_already_called_process_weights_after_loading"


def twin_bytes(model: torch.nn.Module) -> int:
    """Bytes of a `Twin`: of its weights, which embeddings and heads keep beside packed ones, and
    twice those of its buffers."""
    forms: dict[int, torch.Tensor] = {}
    buffers: dict[int, torch.Tensor] = {}
    packed = []
    for layer in model.modules():
        recorded = get_layerwise_info(layer).restore_metadata[0]
        for name, kept in layer._parameters.items():
            if kept is not None:
                forms[id(kept)] = recorded.get(name, kept)
        if type(getattr(layer, "quant_method", None)) is UnquantizedEmbeddingMethod:
            packed.append(recorded.get("weight", layer.weight))
        buffers |= {id(kept): kept for kept in layer._buffers.values() if kept is not None}
    once = sum(_nbytes(form) for form in (*forms.values(), *packed))
    return once + 2 * sum(_nbytes(buffer) for buffer in buffers.values())


def _nbytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def check_layers(model: torch.nn.Module) -> None:
    """Raises `UnpreparableError`: the model has a layer of a kind that is not known here."""
    for name, layer in model.named_modules():
        _check_known(name, layer)


class Twin:
    """The second copy of one model on a CPU.

    The constructor allocates memory for all weights; `process` gives that memory back layer by
    layer, and allocates as much for packed weights.

    Args:
        model: of which `check_layers` knows all layers.

    Attributes:
        model: the copy, which cannot compute.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._names = {layer: name for name, layer in model.named_modules()}
        self._twins = {layer: _hollow(layer) for layer in self._names}
        own: dict[int, torch.Tensor] = {}  # by the id of the tensor that a layer serves with
        for layer, twin in self._twins.items():
            self._fill(layer, twin, own)
        self._begun = {twin: dict(vars(twin)) for twin in self._twins.values()}
        self._buffers: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # and as they were
        for twin in self._twins.values():
            for buffer in twin._buffers.values():
                if buffer is not None and id(buffer) not in self._buffers:
                    self._buffers[id(buffer)] = buffer, buffer.clone()
        self._served = _Served(model)
        self.model = self._twins[model]

    def load(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """As ``model.load_weights``.

        Raises:
            UnpreparableError: the model's loaders write to the weights that serve, and were
                stopped; or do not tell which weights they loaded.
        """
        load: Any = self.model.load_weights
        with self._served, torch.no_grad():
            loaded: set[str] | None = load(weights)
        if loaded is None:  # weights that were not loaded may have any numbers
            raise UnpreparableError("the model does not tell which weights it loaded")
        return loaded

    def process(self) -> Iterator[None]:
        """Pack the weights, one layer for each item. Raises as `load` does."""
        for layer in self._twins.values():
            with self._served, torch.no_grad():
                _process(layer)
            yield

    def replacement(self) -> Replacement:
        """The replacement that makes the model serve with the loaded weights.

        Raises:
            UnpreparableError: more than weights would change.
        """
        copies: dict[int, Copy] = {}
        swaps = []
        for layer, twin in self._twins.items():
            attributes = self._begun[twin]
            for now_has, has in (
                (twin._parameters, layer._parameters),
                (twin._buffers, layer._buffers),
            ):
                if now_has.keys() != has.keys():
                    raise UnpreparableError(f"{self._names[layer]} gets other parameters")
            written = {own: value for own, value in twin._buffers.items() if self._differs(value)}
            for own, prepared in (twin._parameters | written).items():
                kept = value_of(layer, own)
                name = f"{self._names[layer]}.{own}"
                if kept is None or prepared is None:
                    if kept is not prepared:
                        raise UnpreparableError(f"{name} comes or goes")
                elif (kept.shape, kept.dtype) != (prepared.shape, prepared.dtype):
                    raise UnpreparableError(f"{name} gets another form")
                elif kept.numel():
                    copies[id(kept)] = Copy(name, layer, own, prepared.data)
            now = vars(twin)
            changed = {key for key in attributes | now if attributes.get(key) is not now.get(key)}
            if changed - {Swap.ATTRIBUTE}:
                raise UnpreparableError(f"{self._names[layer]} derives {sorted(changed)}")
            if changed:
                swaps.append(Swap(self._names[layer], layer, now[Swap.ATTRIBUTE]))
        return Replacement(tuple(copies.values()), tuple(swaps))

    def close(self) -> None:
        """Let go of all memory that no `Replacement` has: loaders and weights hold each other."""
        for twin in self._twins.values():
            vars(twin).clear()
        self._begun.clear()
        self._buffers.clear()

    def _differs(self, buffer: torch.Tensor | None) -> bool:
        """Whether a twin's buffer has other bytes than at first: loaders may write by ``.data``,
        which counts as no write, or put another one in its place."""
        if buffer is None:
            return False
        _, before = self._buffers.get(id(buffer), (None, None))
        return before is None or not same_bytes(buffer.reshape(-1), before.reshape(-1))

    def _fill(
        self, layer: torch.nn.Module, twin: torch.nn.Module, own: dict[int, torch.Tensor]
    ) -> None:
        """Give a twin its children, and tensors of its own, tied where the layer's are."""
        for name, child in layer._modules.items():
            twin._modules[name] = None if child is None else self._twins[child]
        for name, value in vars(layer).items():
            if isinstance(value, torch.nn.Module) and value in self._twins:
                vars(twin)[name] = self._twins[value]
        recorded = get_layerwise_info(layer).restore_metadata[0]
        for name, kept in layer._parameters.items():
            if kept is None:
                twin._parameters[name] = None
                continue
            if id(kept) not in own:
                own[id(kept)] = self._empty(recorded.get(name, kept), layer)
            twin._parameters[name] = own[id(kept)]  # type: ignore[assignment]
        for name, buffer in layer._buffers.items():
            if buffer is not None and id(buffer) not in own:
                own[id(buffer)] = buffer.clone()
                vars(own[id(buffer)]).update(vars(buffer))
                self._take_loaders(own[id(buffer)], layer)
            twin._buffers[name] = None if buffer is None else own[id(buffer)]

    def _empty(self, form: torch.Tensor, layer: torch.nn.Module) -> torch.Tensor:
        """A tensor of the same class and layout, whose loaders are those of the twins."""
        with torch.device("cpu"):
            made: torch.Tensor = materialize_meta_tensor(form)
        self._take_loaders(made, layer)
        return made

    def _take_loaders(self, made: torch.Tensor, layer: torch.nn.Module) -> None:
        """Give a tensor, which has the attributes of a layer's, the loaders of its twin."""
        for name, value in vars(made).items():
            loader = value
            # A reload leaves its wrapper there, which outside of a reload loads nothing.
            while getattr(loader, "__name__", None) == _WRAPPER:
                loader = loader.__wrapped__
            if isinstance(loader, MethodType):
                owner = layer if loader.__self__ is layer_ref_sentinel else loader.__self__
                if isinstance(owner, torch.nn.Module) and owner in self._twins:
                    loader = MethodType(loader.__func__, self._twins[owner])
            vars(made)[name] = loader


class _Served(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Stops operations, of this thread, that would write to the memory of a model that serves."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._kept = {
            tensor.untyped_storage().data_ptr()
            for layer in model.modules()
            for values in (vars(layer), layer._parameters, layer._buffers)
            for value in values.values()
            for tensor in (value if isinstance(value, list | tuple) else (value,))
            if isinstance(tensor, torch.Tensor) and tensor.device.type == "cpu" and tensor.numel()
        }

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        for number, argument in enumerate(func._schema.arguments):
            if argument.alias_info is None or not argument.alias_info.is_write:
                continue
            value = args[number] if number < len(args) else kwargs.get(argument.name)
            for tensor in value if isinstance(value, list | tuple) else (value,):
                if (
                    isinstance(tensor, torch.Tensor)
                    and tensor.untyped_storage().data_ptr() in self._kept
                ):
                    raise UnpreparableError("the model's loaders write to the weights that serve")
        return func(*args, **kwargs)


def _hollow(layer: torch.nn.Module) -> torch.nn.Module:
    twin: torch.nn.Module = object.__new__(type(layer))
    vars(twin).update(vars(layer))
    for name in ("_parameters", "_buffers", "_modules"):
        vars(twin)[name] = {}
    vars(twin)["_non_persistent_buffers_set"] = set(layer._non_persistent_buffers_set)
    vars(twin).pop(_CALLED, None)  # else the weights would not be processed again
    return twin


def _check_known(name: str, layer: Any) -> None:
    """Refuse layers of which a reload would change more than `Replacement` does."""
    kind = f"{name or 'the model'} ({type(layer).__name__})"
    if isinstance(layer, BaseLayerWithLoRA):
        raise UnpreparableError(f"{kind} takes adapters")
    if any(
        value is not None and value.device.type != "cpu" for value in layer._parameters.values()
    ):
        raise UnpreparableError(f"{kind} is not on a CPU")
    if is_deferred_attention_layer(layer) and not (
        type(layer) is Attention
        and not layer._parameters
        and type(layer.impl).process_weights_after_loading
        is AttentionImplBase.process_weights_after_loading
    ):
        raise UnpreparableError(f"{kind} is attention that derives numbers from weights")
    method = getattr(layer, "quant_method", None)
    if not isinstance(method, QuantizeMethodBase) or type(method) in _PACK:
        return
    if type(method) is not UnquantizedFusedMoEMethod or not _moves_rows(method):
        raise UnpreparableError(f"{kind} has weights of {type(method).__name__}")


def _moves_rows(method: Any) -> bool:
    """Whether the kernel of a mixture of experts keeps nothing but the layer's parameters."""
    kernel = method.moe_kernel
    return (
        kernel is not None
        and isinstance(kernel.fused_experts, CPUUnquantizedExperts)
        and not method.moe.has_bias
        and not method.moe.moe_parallel_config.enable_eplb
    )


def _process(layer: Any) -> None:
    method = getattr(layer, "quant_method", None)
    if not isinstance(method, QuantizeMethodBase):
        return
    method.process_weights_after_loading(layer)
    if isinstance(method, UnquantizedFusedMoEMethod):
        # vLLM 0.32 packs experts only as it makes their kernel, which the layers keep.
        method.moe_kernel.fused_experts.process_weights_after_loading(layer)
