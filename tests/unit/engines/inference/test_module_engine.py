"""A module gets the version, bit for bit, or keeps its weights."""

import weakref
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch
from trainsync.engines.inference.module import ModuleEngine
from trainsync.weights.errors import SchemaMismatchError

from tests.unit.engines.inference.tensors import Named


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
