"""The tensors of a version, and the schema that describes them."""

import itertools
from typing import Any

import pytest
import torch
from trainsync.weights.buckets.tensor_stream import Describe, Description, schema_of
from trainsync.weights.errors import InconsistentUploadError, UnsupportedWeightsError

from tests.unit.weights.transports.broadcast.pair import Pair, weights


@pytest.mark.parametrize("delta", [False, True])
def test_tensors_that_differ_from_call_to_call_are_the_trainers_fault(delta: bool) -> None:
    calls = itertools.count()
    once = iter(weights(1))
    pair = Pair(delta=delta)
    try:
        for version, tensors in (
            (1, lambda: [("w", torch.zeros(10 + next(calls)))]),
            (2, lambda: once),  # gives nothing when it is asked again
        ):
            with pytest.raises(InconsistentUploadError, match="change from call to call: "):
                pair.trainer.broadcast(version, tensors)
        assert pair.trainer.quarantined() == {}
        assert pair.send(3).served == ("e",)
        assert pair.trainer.quarantined() == {}
    finally:
        pair.explorer.close()
        pair.trainer.close()


@pytest.mark.parametrize("delta", [False, True])
def test_a_version_without_a_tensor_is_not_sent(delta: bool) -> None:
    pair = Pair(delta=delta)
    try:
        pair.send(1)
        with pytest.raises(UnsupportedWeightsError, match="there is no tensor"):
            pair.trainer.broadcast(2, list)
        assert pair.send(3).served == ("e",)
    finally:
        pair.explorer.close()
        pair.trainer.close()


def test_the_schema_is_sent_again_only_when_it_has_changed(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    members = pair.trainer._members
    sent: list[bool] = []
    genuine = members.tell

    def tell(to: Any, frame: Any) -> None:
        if frame["kind"] == "prepare":
            sent.append("schema" in frame)
        genuine(to, frame)

    monkeypatch.setattr(members, "tell", tell)
    for version in (1, 2):
        pair.send(version)
    pair.trainer.broadcast(3, lambda: [*weights(3), ("more", torch.ones(2))])
    assert sent[:2] == [True, False]
    assert sent[-1] is True


def test_a_schema_that_is_known_is_not_gathered_for_and_a_wrong_one_does_no_harm(
    pair: Pair,
) -> None:
    gathered: list[int] = []

    def tensors(version: int) -> list[tuple[str, torch.Tensor]]:
        gathered.append(version)
        return weights(version)

    def describe(given: list[tuple[str, torch.Tensor]]) -> Describe:
        return lambda: Description(schema_of(given), torch.device("cpu"))

    known = pair.trainer.broadcast(1, lambda: tensors(1), describe=describe(weights(1)))
    assert (known.served, known.passes, gathered) == (("e",), 1, [1])
    changed = [*weights(2), ("c", torch.ones(2))]
    right = pair.trainer.broadcast(2, lambda: changed, describe=describe(changed))
    assert (right.served, right.passes) == (("e",), 2), "it was known by the schema before"
    wrong = pair.trainer.broadcast(3, lambda: tensors(3), describe=describe(changed))
    assert wrong.served == ("e",)
    with pair.explorer.reading() as served:
        assert served is not None
        assert served.version == 3
        assert sorted(served.tensors) == ["a", "b"]
