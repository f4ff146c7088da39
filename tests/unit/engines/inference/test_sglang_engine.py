"""SGLang gets every weight, and its refusals are raised."""

from types import SimpleNamespace
from typing import Any

import pytest
from trainsync.engines.errors import EngineUpdateError
from trainsync.engines.inference.base import InferenceEngine
from trainsync.engines.inference.sglang import SGLangEngine

from tests.unit.engines.inference.tensors import Named, every_kind, raw


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
