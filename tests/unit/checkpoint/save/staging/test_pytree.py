"""`map_tensors`: values passed through, copied and refused."""

import io
from collections import Counter, OrderedDict, defaultdict
from typing import Any

import numpy as np
import pytest
import torch
from trainsync.checkpoint.errors import UnsupportedStateError
from trainsync.checkpoint.save.staging import pytree
from trainsync.checkpoint.save.staging.pytree import Path, map_tensors, path_text


def _same(tensor: torch.Tensor, path: Path) -> torch.Tensor:
    return tensor


ACCEPTED: list[Any] = [
    None,
    True,
    -1,
    10**40,
    2**2039 - 1,
    1.5,
    2j,
    "text",
    b"bytes",
    bytearray(b"more"),
    (),
    (1, (2, [3])),
    (1, 2, 2**2039 - 1),
    [True, 1],
    {1, (2, 3)},
    {"a": {1: [None]}, (1, 2): "tuple key"},
    OrderedDict(b=1, a=2),
    Counter("hello"),
    torch.float8_e4m3fn,
    torch.device("cuda", 1),
    torch.strided,
    torch.Size([2, 3]),
]


@pytest.mark.parametrize("value", ACCEPTED, ids=repr)
def test_what_is_accepted_is_read_back_with_weights_only(value: Any) -> None:
    copied = map_tensors({"value": value}, _same)
    file = io.BytesIO()
    torch.save(copied, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)["value"]
    assert loaded == value
    assert type(loaded) is type(value)


class Custom:
    pass


REFUSED: list[Any] = [
    np.zeros(2),
    np.float64(1.0),
    frozenset({1}),
    defaultdict(list),
    range(3),
    b"",
    2**2040,
    (1, 2**2040),
    Custom(),
    print,
    {Custom: 1},
]


@pytest.mark.parametrize("value", REFUSED, ids=lambda value: type(value).__name__)
def test_what_could_not_be_loaded_is_refused_with_its_path(value: Any) -> None:
    file = io.BytesIO()
    try:
        torch.save(value, file)
        file.seek(0)
        torch.load(file, weights_only=True)
    except Exception:  # noqa: BLE001 - the reason for refusing it: torch would not read it back
        pass
    else:
        pytest.fail("torch reads it back, so there is no reason to refuse it")
    with pytest.raises(UnsupportedStateError, match=r"state\['extra'\]\[1\]"):
        map_tensors({"extra": [0, value]}, _same)


def test_containers_are_copies_all_the_way_down() -> None:
    inner = {"list": [1], "set": {1}, "bytes": bytearray(b"a")}
    copied = map_tensors({"inner": inner}, _same)
    inner["list"].append(2)  # type: ignore[attr-defined]
    inner["set"].add(2)  # type: ignore[attr-defined]
    inner["bytes"][0] = 0  # type: ignore[index]
    inner["new"] = 1  # type: ignore[assignment]
    assert copied == {"inner": {"list": [1], "set": {1}, "bytes": bytearray(b"a")}}


def test_the_metadata_of_a_state_dict_is_kept() -> None:
    state = torch.nn.BatchNorm1d(2).state_dict()
    copied = map_tensors(state, _same)
    assert copied._metadata == state._metadata
    assert copied._metadata is not state._metadata


def test_an_object_of_an_allowed_class_is_deep_copied() -> None:
    held = Custom()
    held.values = [1]  # type: ignore[attr-defined]
    with torch.serialization.safe_globals([Custom]):
        copied = map_tensors({"held": held}, _same)["held"]
    held.values.append(2)  # type: ignore[attr-defined]
    assert copied.values == [1]


def test_every_occurrence_of_a_tensor_goes_through_the_function_with_its_path() -> None:
    tensor = torch.ones(1)
    seen: list[str] = []

    def note(found: torch.Tensor, path: Path) -> torch.Tensor:
        assert found is tensor
        seen.append(path_text(path))
        return found

    map_tensors({"a": tensor, "b": [tensor, (tensor,)]}, note)
    assert seen == ["state['a']", "state['b'][0]", "state['b'][1][0]"]


def test_a_state_of_very_many_python_objects_is_warned_of_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(pytree, "_MANY", 1000)
    monkeypatch.setattr(pytree, "_SLOW_SECONDS", 0.0)
    monkeypatch.setattr(pytree, "_warned", set())
    few = {"extra": {"rows": [{"id": i} for i in range(10)]}}
    many = {"extra": {"rows": [{"id": i} for i in range(1000)], "seen": 3}, "rng": [1, 2]}
    for state in (few, many, many):
        map_tensors(state, lambda tensor, _: tensor)
    (record,) = caplog.records
    assert record.getMessage().startswith("state['extra']['rows'] holds 2001 Python objects")
