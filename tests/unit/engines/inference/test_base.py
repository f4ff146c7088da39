"""Adapters: an engine gets the version, bit for bit, or keeps its weights."""

import asyncio
import itertools
import sys
import weakref
from collections.abc import Iterator, Mapping
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from trainsync.engines.errors import EngineUpdateError
from trainsync.engines.inference.base import InferenceEngine, in_buckets
from trainsync.engines.inference.module import ModuleEngine
from trainsync.engines.inference.sglang import SGLangEngine
from trainsync.engines.inference.vllm import (
    WORKER_EXTENSION,
    AsyncVLLMEngine,
    VLLMEngine,
    WorkerExtension,
)
from trainsync.weights.errors import SchemaMismatchError

Named = list[tuple[str, torch.Tensor]]


class Tied(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(5, 3)
        self.norm = torch.nn.BatchNorm1d(3)
        self.head = torch.nn.Linear(3, 5, bias=False)
        self.head.weight = self.embed.weight


def weights(value: float = 7.0) -> Named:
    state = {name: torch.full_like(tensor, value) for name, tensor in Tied().state_dict().items()}
    return list(state.items())


def content(module: torch.nn.Module) -> dict[str, list[Any]]:
    return {name: tensor.tolist() for name, tensor in module.state_dict().items()}


@pytest.mark.parametrize("left_out", ["head.weight", "embed.weight", None])
def test_a_module_takes_every_weight_in_place_under_any_name_of_a_tied_one(
    left_out: str | None,
) -> None:
    module = Tied()
    before = module.embed.weight
    engine = ModuleEngine(module)
    engine.begin_update(3)
    engine.load_weights((name, tensor) for name, tensor in weights() if name != left_out)
    assert engine.version == 3
    assert all(bool((tensor == 7).all()) for tensor in module.state_dict().values())
    assert module.embed.weight is before
    assert module.head.weight is before


def test_different_values_for_one_tensor_of_the_module_change_nothing() -> None:
    """An untied trainer, and an explorer whose head is its embedding."""
    untied = [(n, t + 1 if n == "head.weight" else t) for n, t in weights()]
    for module in (Tied(), tied_by_data()):
        before = content(module)
        engine = ModuleEngine(module)
        engine.begin_update(3)
        told = "version 3: embed.weight and head.weight are one tensor .* different values"
        with pytest.raises(SchemaMismatchError, match=told):
            engine.load_weights(untied)
        assert content(module) == before
        engine.load_weights(weights())
        assert engine.version == 3


def tied_by_data() -> torch.nn.Module:
    module = Tied()
    module.head.weight = torch.nn.Parameter(module.embed.weight.data)
    return module


def other_dtype(named: Named) -> Named:
    return [(n, t.to(torch.bfloat16) if n == "norm.bias" else t) for n, t in named]


def other_shape(named: Named) -> Named:
    return [(n, t[:-1] if n == "norm.weight" else t) for n, t in named]


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda named: named[1:-1], "embed.weight is missing"),  # both names of it
        (lambda named: [*named, ("more", torch.zeros(1))], "more is not expected"),
        (lambda named: [*named, named[1]], "a name comes twice"),
        (other_shape, r"norm.weight is float32\[2\] instead of float32\[3\]"),
        (other_dtype, r"norm.bias is bfloat16\[3\] instead of float32\[3\]"),
    ],
)
def test_weights_that_do_not_fit_change_nothing(change: Any, told: str) -> None:
    module = Tied()
    before = content(module)
    engine = ModuleEngine(module, cast=False)
    engine.begin_update(3)
    with pytest.raises(SchemaMismatchError, match=rf"version 3: .*{told}"):
        engine.load_weights(change(weights()))
    assert content(module) == before
    assert engine.version == -1


def test_another_floating_point_dtype_is_converted_and_told_once_and_another_shape_is_not(
    caplog: pytest.LogCaptureFixture,
) -> None:
    module = Tied()
    engine = ModuleEngine(module)
    with caplog.at_level("INFO"):
        for version in (1, 2):
            engine.begin_update(version)
            engine.load_weights(other_dtype(weights(2.0)))
    assert module.norm.bias.dtype is torch.float32
    assert module.norm.bias.tolist() == [2, 2, 2]
    (record,) = caplog.records
    assert "version 1: 1 weights (6 bytes) are converted" in record.getMessage()
    assert "norm.bias from bfloat16 to float32" in record.getMessage()
    with pytest.raises(SchemaMismatchError, match=r"norm\.weight"):
        engine.load_weights(other_shape(weights()))


def test_integers_are_not_converted_to_floating_point_nor_the_other_way() -> None:
    swapped = {"norm.num_batches_tracked": torch.float32, "norm.bias": torch.int32}
    for name, dtype in swapped.items():
        engine = ModuleEngine(Tied())
        with pytest.raises(SchemaMismatchError, match=name):
            engine.load_weights([(n, t.to(dtype) if n == name else t) for n, t in weights()])


class PutTogether(Mapping[str, torch.Tensor]):
    """Tensors that are made when they are asked for; knows how many were held at once."""

    def __init__(self, named: Named) -> None:
        self.most = 0
        self._named = dict(named)
        self._held: weakref.WeakSet[torch.Tensor] = weakref.WeakSet()

    def __getitem__(self, name: str) -> torch.Tensor:
        made = self._named[name].clone()
        self._held.add(made)
        self.most = max(self.most, len(self._held))
        return made

    def __iter__(self) -> Iterator[str]:
        return iter(self._named)

    def __len__(self) -> int:
        return len(self._named)


def test_weights_that_are_put_together_one_by_one_are_never_held_all_at_once() -> None:
    module = Tied()
    engine = ModuleEngine(module)
    engine.begin_update(3)
    offered = PutTogether(weights())
    engine.load_weights(offered.items())
    assert all(bool((tensor == 7).all()) for tensor in module.state_dict().values())
    assert offered.most <= 2, "the one before may live until the next is there"
    before = content(module)
    with pytest.raises(SchemaMismatchError, match=r"norm\.weight"):
        engine.load_weights(PutTogether(other_shape(weights(8.0))).items())
    assert content(module) == before


def test_a_module_that_was_changed_half_way_has_no_version_until_an_update_succeeds() -> None:
    class Failing(PutTogether):
        left = 10  # all seven are looked at first

        def __getitem__(self, name: str) -> torch.Tensor:
            self.left -= 1
            if not self.left:
                raise MemoryError("no memory")
            return super().__getitem__(name)

    engine = ModuleEngine(Tied())
    engine.begin_update(1)
    engine.load_weights(weights())
    engine.begin_update(2)
    with pytest.raises(MemoryError):
        engine.load_weights(Failing(weights(8.0)).items())
    assert engine.version == -1
    engine.begin_update(2)
    engine.load_weights(weights(8.0))
    assert engine.version == 2


@given(st.lists(st.integers(0, 40), max_size=30), st.integers(1, 100))
def test_buckets_hold_everything_in_order_and_no_more_than_their_size(
    sizes: list[int], size: int
) -> None:
    named = [(str(n), torch.zeros(count, dtype=torch.uint8)) for n, count in enumerate(sizes)]
    buckets = list(in_buckets(named, size))
    assert [name for bucket in buckets for name, _ in bucket] == [name for name, _ in named]
    for bucket in buckets:
        assert len(bucket) == 1 or sum(tensor.nbytes for _, tensor in bucket) <= size
    for one, following in itertools.pairwise(buckets):
        assert sum(tensor.nbytes for _, tensor in [*one, following[0]]) > size


def test_a_bucket_without_a_size_is_refused() -> None:
    with pytest.raises(ValueError, match="more than 0 bytes, got 0"):
        list(in_buckets([], 0))


def every_kind() -> Named:
    values = torch.arange(24, dtype=torch.float32)
    return [
        ("float32", values.reshape(4, 6)),
        ("bfloat16, not contiguous", values.to(torch.bfloat16).reshape(4, 6).t()),
        ("float8", values.to(torch.float8_e4m3fn)),
        ("nan", torch.tensor([float("nan"), -0.0])),
        ("scalar", torch.tensor(7)),
        ("empty", torch.empty(0, 3)),
    ]


def raw(named: Named) -> list[tuple[str, torch.dtype, tuple[int, ...], bytes]]:
    return [
        (n, t.dtype, tuple(t.shape), t.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        for n, t in named
    ]


class FakeModel:
    """As a model of vLLM: ``load_weights`` of names and full tensors."""

    def __init__(self, log: list[str]) -> None:
        self.loaded: Named = []
        self._log = log

    def load_weights(self, weights: Any) -> set[str]:
        self._log.append("load")
        named = list(weights)
        self.loaded += named
        return {name for name, _ in named}


class FakeLLM:
    """``vllm.LLM`` with two workers, as far as the adapter goes."""

    def __init__(self, log: list[str]) -> None:
        self.log = log
        self.reset = True
        self.workers = []
        for _ in range(2):
            worker = WorkerExtension()
            worker.device = torch.device("cpu")
            worker.model_runner = SimpleNamespace(model=FakeModel(log), model_config="config")
            self.workers.append(worker)

    def collective_rpc(
        self,
        method: str,
        timeout: float | None = None,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> list[Any]:
        assert timeout == 5.0
        return [getattr(worker, method)(*args, **(kwargs or {})) for worker in self.workers]

    def reset_prefix_cache(
        self, reset_running_requests: bool = False, reset_connector: bool = False
    ) -> bool:
        self.log.append("reset")
        return self.reset


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """What happens, in order; with the module of vLLM that the extension imports."""
    happened: list[str] = []
    utils = ModuleType("vllm.model_executor.model_loader.utils")

    def process_weights_after_loading(model: Any, model_config: Any, device: Any) -> None:
        assert (model_config, device) == ("config", torch.device("cpu"))
        happened.append("process")

    utils.process_weights_after_loading = process_weights_after_loading  # type: ignore[attr-defined]
    path = ""
    for name in utils.__name__.split("."):
        path = f"{path}.{name}".lstrip(".")
        monkeypatch.setitem(sys.modules, path, ModuleType(path))
    monkeypatch.setitem(sys.modules, utils.__name__, utils)
    yield happened


def test_every_worker_of_vllm_loads_every_weight_and_forgets_the_old_prefixes(
    log: list[str],
) -> None:
    llm = FakeLLM(log)
    engine: InferenceEngine = VLLMEngine(llm, bucket_size=100, timeout=5.0)
    engine.begin_update(4)
    assert engine.load_weights(iter(every_kind())) == 6
    for worker in llm.workers:
        assert raw(worker.model_runner.model.loaded) == raw(every_kind())
    assert log == ["load"] * 4 + ["process"] * 2 + ["reset"]


def test_a_prefix_cache_that_vllm_keeps_is_told_of(log: list[str]) -> None:
    llm = FakeLLM(log)
    llm.reset = False
    engine = VLLMEngine(llm, timeout=5.0)
    engine.begin_update(4)
    with pytest.raises(EngineUpdateError, match="version 4 is loaded, but vLLM's prefix cache"):
        engine.load_weights(every_kind())


class AsyncLLM(FakeLLM):
    """``AsyncLLM``: the same methods, as coroutines."""

    async def collective_rpc(self, *given: Any, **named: Any) -> list[Any]:  # type: ignore[override]
        return super().collective_rpc(*given, **named)

    async def reset_prefix_cache(self) -> bool:  # type: ignore[override]
        return super().reset_prefix_cache()


async def take(engine: AsyncVLLMEngine, version: int) -> int:
    engine.begin_update(version)
    return await engine.load_weights(iter(every_kind()))


def test_every_worker_of_an_asynchronous_vllm_loads_every_weight(log: list[str]) -> None:
    llm = AsyncLLM(log)
    assert asyncio.run(take(AsyncVLLMEngine(llm, bucket_size=100, timeout=5.0), 4)) == 6
    for worker in llm.workers:
        assert raw(worker.model_runner.model.loaded) == raw(every_kind())
    assert log == ["load"] * 4 + ["process"] * 2 + ["reset"]
    llm.reset = False
    with pytest.raises(EngineUpdateError, match="vLLM's prefix cache"):
        asyncio.run(take(AsyncVLLMEngine(llm, timeout=5.0), 5))


def test_an_asynchronous_vllm_is_refused_by_a_synchronous_client(log: list[str]) -> None:
    with pytest.raises(TypeError, match="AsyncLLM answers with coroutines; expected AsyncVLLM"):
        VLLMEngine(AsyncLLM(log))  # type: ignore[arg-type]
    hidden = SimpleNamespace(
        collective_rpc=lambda *a, **k: AsyncLLM(log).collective_rpc(*a, **k),
        reset_prefix_cache=lambda: True,
    )
    engine = VLLMEngine(hidden, timeout=5.0)
    engine.begin_update(4)
    told = "version 4 is not loaded: trainsync_load_weights returned coroutine to be awaited"
    with pytest.raises(EngineUpdateError, match=told):
        engine.load_weights(every_kind())
    assert log == []


@pytest.mark.parametrize(
    ("answers", "told"),
    [
        (None, "answered trainsync_load_weights with None, expected a list"),
        ([], "answered trainsync_load_weights with \\[\\], expected a list"),
        ([6, None], "worker 1 of vLLM answered trainsync_load_weights with None, expected 6"),
    ],
)
def test_what_vllm_answers_is_not_taken_for_success_unless_every_worker_says_so(
    answers: Any, told: str, log: list[str]
) -> None:
    llm = FakeLLM(log)
    llm.collective_rpc = lambda *a, **k: answers  # type: ignore[method-assign]
    engine = VLLMEngine(llm)
    engine.begin_update(4)
    with pytest.raises(EngineUpdateError, match=f"version 4 is not loaded: .*{told}"):
        engine.load_weights(every_kind())


def test_the_worker_extension_is_found_by_its_name() -> None:
    module, _, name = WORKER_EXTENSION.rpartition(".")
    assert getattr(sys.modules[module], name) is WorkerExtension


class FakeSGLang:
    """``sglang.Engine``, as far as the adapter goes."""

    def __init__(self, fail_at: int = -1) -> None:
        self.calls: list[tuple[Named, bool]] = []
        self._fail_at = fail_at

    def update_weights_from_tensor(
        self, named_tensors: Named, load_format: str | None = None, flush_cache: bool = True
    ) -> tuple[bool, str]:
        assert load_format is None
        self.calls.append((named_tensors, flush_cache))
        return (False, "no room") if len(self.calls) == self._fail_at else (True, "Success")


def test_sglang_gets_every_weight_and_empties_its_cache_once_with_the_last() -> None:
    fake = FakeSGLang()
    engine: InferenceEngine = SGLangEngine(fake, bucket_size=100)
    engine.begin_update(4)
    assert engine.load_weights(iter(every_kind())) == 6
    assert [flush for _, flush in fake.calls] == [False, True]
    sent = [named for call, _ in fake.calls for named in call]
    assert raw(sent) == raw(every_kind())
    for (_, given_to), (_, own) in zip(sent, every_kind(), strict=True):
        assert given_to.numel() == 0 or given_to.data_ptr() != own.data_ptr()


def test_what_sglang_refuses_is_raised() -> None:
    engine = SGLangEngine(FakeSGLang(fail_at=2), bucket_size=100)
    engine.begin_update(4)
    with pytest.raises(EngineUpdateError, match="did not take version 4: no room"):
        engine.load_weights(every_kind())


async def later() -> tuple[bool, str]:
    return True, "Success"


@pytest.mark.parametrize(
    ("answer", "told"),
    [
        (lambda: None, "SGLang answered None, expected"),
        (lambda: {"success": True}, "SGLang answered .*, expected"),
        (lambda: ("no", "room"), "SGLang answered .*, expected"),
        (later, "returned coroutine to be awaited"),
    ],
)
def test_what_sglang_answers_is_not_taken_for_success_unless_it_says_so(
    answer: Any, told: str
) -> None:
    engine = SGLangEngine(SimpleNamespace(update_weights_from_tensor=lambda *a, **k: answer()))
    engine.begin_update(4)
    with pytest.raises(EngineUpdateError, match=f"version 4 is not loaded: .*{told}"):
        engine.load_weights(every_kind())


def test_an_engine_that_keeps_weights_computes_with_the_very_tensors_that_came() -> None:
    module = Tied()
    before = dict(module.named_parameters())
    engine = ModuleEngine(module, in_place=False)
    assert engine.keeps_weights
    for version in (1, 2):
        came = dict(weights(float(version)))
        came["norm.bias"] = came["norm.bias"].bfloat16()
        engine.begin_update(version)
        engine.keep_weights(came.items())
        assert engine.version == version
        assert all(bool((tensor == version).all()) for tensor in module.state_dict().values())
        assert module.norm.weight.data_ptr() == came["norm.weight"].data_ptr()
        assert module.norm.bias.dtype is torch.float32, "it was converted"
        assert module.norm.running_mean is not None
        assert module.norm.running_mean.data_ptr() != came["norm.running_mean"].data_ptr()
        assert module.head.weight is module.embed.weight is before["embed.weight"]
    with pytest.raises(SchemaMismatchError, match=r"norm\.weight"):
        engine.keep_weights(other_shape(weights()))
    assert engine.version == 2
