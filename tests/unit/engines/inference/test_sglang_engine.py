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


class WithSessions(FakeSGLang):
    """As SGLang 0.5.23, which takes tensors in a session alone."""

    def __init__(self, fail_at: int = -1, ends: bool = True) -> None:
        super().__init__(fail_at)
        self.open = False
        self.sessions = 0
        self._ends = ends

    def begin_weight_update(self) -> tuple[bool, str]:
        if self.open:
            return False, "a weight-update session is already open"
        self.open = True
        return True, "Success"

    def end_weight_update(self) -> tuple[bool, str]:
        self.open = False
        self.sessions += 1
        return (True, "Success") if self._ends else (False, "the engine is gone")

    def update_weights_from_tensor(
        self, named_tensors: Named, load_format: str | None = None, flush_cache: bool = True
    ) -> tuple[bool, str]:
        assert self.open
        return super().update_weights_from_tensor(named_tensors, load_format, flush_cache)


def test_all_buckets_of_a_version_come_in_one_session() -> None:
    fake = WithSessions()
    engine: InferenceEngine = SGLangEngine(fake, bucket_size=100)
    for version in (4, 5):
        engine.begin_update(version)
        assert engine.load_weights(every_kind()) == 6
    assert fake.sessions == 2
    assert not fake.open


def test_a_version_that_is_refused_half_way_leaves_no_session_open() -> None:
    fake = WithSessions(fail_at=2)
    engine = SGLangEngine(fake, bucket_size=100)
    engine.begin_update(4)
    with pytest.raises(EngineUpdateError, match="no room"):
        engine.load_weights(every_kind())
    engine.begin_update(5)
    assert engine.load_weights(every_kind()) == 6


def test_a_session_that_does_not_end_well_is_raised() -> None:
    engine = SGLangEngine(WithSessions(ends=False), bucket_size=100)
    engine.begin_update(4)
    with pytest.raises(EngineUpdateError, match="the engine is gone"):
        engine.load_weights(every_kind())
    engine = SGLangEngine(WithSessions(fail_at=1, ends=False), bucket_size=100)
    engine.begin_update(4)
    with pytest.raises(EngineUpdateError, match="no room") as raised:
        engine.load_weights(every_kind())
    assert "the engine is gone" in str(raised.value.__notes__)
