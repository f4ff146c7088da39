"""Layers prepared beside those that serve: ``twin_cases.py``, in vLLM's environment.

Prints ``CASE NAME`` for each case that went well.
"""

import threading
import traceback
import weakref
from collections.abc import Callable, Iterable, Iterator
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from trainsync.engines.errors import EngineUpdateError
from trainsync.engines.servers.errors import KEPT
from trainsync.engines.servers.preparing import PreparationOutcome
from trainsync.integrations.vllm import preparing, transfer
from trainsync.integrations.vllm.errors import NoRoomError, UnpreparableError
from trainsync.integrations.vllm.loaded_model import LoadedModel
from trainsync.integrations.vllm.preparing import PreparedVersion, PreparingThread
from trainsync.integrations.vllm.replacement import Replacement, Retired
from trainsync.integrations.vllm.transfer import TrainsyncEngine, UpdateInfo, _reference
from trainsync.integrations.vllm.twin import Twin, twin_bytes
from vllm.model_executor.layers.linear import ReplicatedLinear, UnquantizedLinearMethod
from vllm.model_executor.layers.vocab_parallel_embedding import (
    UnquantizedEmbeddingMethod,
    VocabParallelEmbedding,
)
from vllm.model_executor.model_loader.reload import record_metadata_for_reloading
from vllm.model_executor.models.utils import AutoWeightsLoader

Weights = Iterable[tuple[str, torch.Tensor]]


class Model(torch.nn.Module):
    """Weights that vLLM's own loader loads."""

    def __init__(self, **buffers: torch.Tensor) -> None:
        super().__init__()
        for name, value in buffers.items():
            self.register_buffer(name, value)

    def load_weights(self, weights: Weights) -> set[str] | None:
        """Returns the names of those that were loaded."""
        loaded: set[str] = AutoWeightsLoader(self).load_weights(weights)
        return loaded


def _replaced(model: Model, weights: Weights) -> None:
    twin = Twin(model)
    twin.load(weights)
    for _ in twin.process():
        pass
    twin.replacement().make()
    twin.close()


def buffer_that_the_checkpoint_has() -> None:
    """As the scalar of each of Gemma 4's layers, which vLLM writes to by ``.data``."""
    model = Model(scalar=torch.ones(1))
    _replaced(model, [("scalar", torch.tensor([2.0]))])
    assert model.scalar.tolist() == [2.0]


def buffer_that_loaders_replace() -> None:
    """The layer that serves has the new numbers in its own memory."""

    class Replacing(Model):
        def load_weights(self, weights: Weights) -> set[str]:
            self.scalar = dict(weights)["scalar"].clone()
            return {"scalar"}

    model = Replacing(scalar=torch.ones(1))
    memory = model.scalar.data_ptr()
    _replaced(model, [("scalar", torch.tensor([2.0]))])
    assert model.scalar.tolist() == [2.0]
    assert model.scalar.data_ptr() == memory


def buffer_that_has_a_loader_of_its_own() -> None:
    """As of layers that are cut for several workers."""
    model = Model(scalar=torch.ones(1))

    def double(buffer: torch.Tensor, weight: torch.Tensor) -> None:
        buffer.data.copy_(2 * weight)

    model.scalar.weight_loader = double
    _replaced(model, [("scalar", torch.tensor([2.0]))])
    assert model.scalar.tolist() == [4.0]


def buffer_that_serving_changes() -> None:
    """It is no weight, and stays as it is."""
    model = Model(count=torch.zeros(1))
    twin = Twin(model)
    model.count.add_(1)
    twin.load([])
    twin.replacement().make()
    assert model.count.tolist() == [1.0]


def _linear() -> Model:
    layer = object.__new__(ReplicatedLinear)
    torch.nn.Module.__init__(layer)
    weight = torch.randn(64, 32, generator=torch.Generator().manual_seed(0)).bfloat16()
    layer.weight = torch.nn.Parameter(weight, requires_grad=False)
    layer.bias = None
    layer.quant_method = object.__new__(UnquantizedLinearMethod)
    model = Model()
    model.layer = layer
    record_metadata_for_reloading(model)
    layer.quant_method.process_weights_after_loading(layer)
    assert not layer.weight.numel(), "the layer keeps its weights"
    return model


def weights_that_were_packed_are_let_go() -> None:
    """Else a worker needs memory for a third copy."""
    twin = Twin(_linear())
    twin.load([("layer.weight", torch.ones(64, 32, dtype=torch.bfloat16))])
    unpacked = weakref.ref(twin.model.layer.weight)
    for _ in twin.process():
        pass
    assert unpacked() is None


def embeddings_that_keep_weights_beside_packed_ones() -> None:
    """A tied head packs a third copy."""
    model = Model()
    for name in ("embed_tokens", "lm_head"):
        layer = object.__new__(VocabParallelEmbedding)
        torch.nn.Module.__init__(layer)
        layer.quant_method = UnquantizedEmbeddingMethod()
        setattr(model, name, layer)
    weight = torch.nn.Parameter(torch.ones(64, 32, dtype=torch.bfloat16), requires_grad=False)
    model.embed_tokens.weight = model.lm_head.weight = weight
    assert twin_bytes(model) == 3 * 64 * 32 * 2


def memory_that_others_take_meanwhile() -> None:
    """Such as another engine of the same server."""
    engine = _engine(_linear())
    staged = engine._staged[1]
    staged.tensors["layer.weight"] = torch.ones(64, 32, dtype=torch.bfloat16)
    free = [10_000]
    with patch.object(transfer, "free_memory", lambda: free[0]):
        made = engine._prepare(staged, lambda: None)
        assert len(made.replacement.swaps) == 1
        try:
            engine._prepare(staged, lambda: free.__setitem__(0, 100))
        except NoRoomError as error:
            assert "100 bytes" in str(error), error
        else:
            raise AssertionError("it is prepared")


def layer_of_another_kind_where_memory_is_full() -> None:
    """More memory would not help, as on a GPU."""

    class Other(UnquantizedLinearMethod):
        pass

    model = _linear()
    model.layer.quant_method = object.__new__(Other)
    engine = _engine(model)
    with patch.object(transfer, "free_memory", lambda: 0):
        try:
            engine._prepare(engine._staged[1], lambda: None)
        except UnpreparableError as error:
            assert "has weights of Other" in str(error), error
        else:
            raise AssertionError("it is prepared")


def loaders_that_do_not_tell_what_they_loaded() -> None:
    """The others of the twin's weights would be whatever its memory had."""

    class Silent(Model):
        def load_weights(self, weights: Weights) -> None:
            super().load_weights(weights)

    try:
        Twin(Silent(scalar=torch.ones(1))).load([])
    except UnpreparableError as error:
        assert "does not tell" in str(error), error
    else:
        raise AssertionError("it is prepared")


_UPDATE = UpdateInfo("version/1.json", "sha256:" + "0" * 64)


def _engine(
    model: torch.nn.Module, prepare: Callable[[Callable[[], None]], PreparedVersion] | None = None
) -> Any:
    """One that has looked at a version, and prepares it."""
    engine = object.__new__(TrainsyncEngine)
    engine.model = model
    text = SimpleNamespace(tie_word_embeddings=False)
    engine.model_config = SimpleNamespace(quantization=None, hf_text_config=text)
    engine.parallel_config = SimpleNamespace(world_size=1, nnodes=1)
    engine._target = LoadedModel(model, engine.model_config)
    engine._draft = None
    staged: Any = SimpleNamespace(index=SimpleNamespace(weight_version=1), tensors={})
    engine._staged = _reference(_UPDATE), staged
    engine._preparing = prepare and PreparingThread(prepare, "version 1", 60)
    engine._retired = Retired()
    engine._asleep = False
    return engine


def worker_whose_preparation_does_not_end() -> None:
    """Others may have loaded the version by then, so that their server must not resume."""
    may_end = threading.Event()

    def work(go_on: Callable[[], None]) -> PreparedVersion:
        may_end.wait(60)
        return PreparedVersion(Replacement((), ()), iter(()), lambda: None)

    seconds, preparing._STOP_SECONDS = preparing._STOP_SECONDS, 0.01
    try:
        _engine(Model(), work).receive_weights(_UPDATE)
    except EngineUpdateError as error:
        assert "did not end" in str(error), error
        assert KEPT not in str(error), error
    else:
        raise AssertionError("it is loaded")
    finally:
        preparing._STOP_SECONDS = seconds
        may_end.set()


def twin_whose_layers_cannot_be_compared() -> None:
    """It is not served, and the layers that serve are compared from then on as before."""

    def looking(*_: Any) -> Iterator[None]:
        yield
        raise AttributeError("a twin lacks something")

    engine = _engine(Model())
    engine._target._layers = SimpleNamespace(looking=looking)
    comparing = engine._target.looking({}, "version 1", torch.nn.Module())
    made = PreparedVersion(Replacement((), ()), comparing, lambda: None)
    thread = PreparingThread(lambda go_on: made, "version 1", 60)
    while (found := thread.ask())[0] is None:
        pass
    assert found[0] is PreparationOutcome.FAILED, found
    assert "a twin lacks something" in found[1], found
    assert engine._target._layers is not None


CASES = (
    buffer_that_the_checkpoint_has,
    buffer_that_loaders_replace,
    buffer_that_has_a_loader_of_its_own,
    buffer_that_serving_changes,
    weights_that_were_packed_are_let_go,
    embeddings_that_keep_weights_beside_packed_ones,
    memory_that_others_take_meanwhile,
    layer_of_another_kind_where_memory_is_full,
    loaders_that_do_not_tell_what_they_loaded,
    worker_whose_preparation_does_not_end,
    twin_whose_layers_cannot_be_compared,
)

if __name__ == "__main__":
    for case in CASES:
        try:
            case()
        except Exception:  # noqa: BLE001 - told, and the test misses its line
            print(f"{case.__name__}:", flush=True)
            traceback.print_exc()
        else:
            print(f"CASE {case.__name__}", flush=True)
    print(f"CASES {len(CASES)}", flush=True)
