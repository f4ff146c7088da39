"""vLLM's workers and drivers hear of its sleep, and nothing goes on with weights that are gone."""

from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest
from trainsync.api.protocol import ASLEEP
from trainsync.engines.servers.tags import DISCARDED
from trainsync.integrations.vllm.sleeping import NOTE_SLEEP, note_sleep

_ALL = {"weights", "kv_cache"}


class _Vllm:
    """Its classes as in vLLM 0.32, and one engine of them."""

    def __init__(self, backend: str | None = "trainsync") -> None:
        self.told: list[bool] = []
        self.whole = True
        self.untellable = self.broken = False
        outer, config = self, None if backend is None else SimpleNamespace(backend=backend)

        class Executor:
            vllm_config = SimpleNamespace(weight_transfer_config=config)

            def __init__(self) -> None:
                self.sleeping_tags: set[str] = set()

            @property
            def is_sleeping(self) -> bool:
                return bool(self.sleeping_tags)

            def collective_rpc(self, method: str, args: tuple[bool]) -> list[bool]:
                assert method == NOTE_SLEEP
                outer.told.append(*args)
                if outer.untellable and args[0]:
                    raise AttributeError(method)
                return [True, outer.whole]

            def sleep(self, level: int = 1) -> None:
                if "weights" in self.sleeping_tags:
                    return
                assert backend != "trainsync" or outer.told[-1], "the workers hear of it before"
                if outer.broken:
                    raise AssertionError("Memory usage increased after sleeping.")
                self.sleeping_tags |= _ALL

            def wake_up(self, tags: list[str] | None = None) -> None:
                self.sleeping_tags -= set(tags or self.sleeping_tags)

        class EngineCore:
            def __init__(self) -> None:
                self.model_executor = Executor()
                self.paused = False
                self.name = "7"

            def sleep(self, level: int = 1, mode: str = "abort") -> Future[None] | None:
                self.paused = True
                if mode == "wait":
                    return outer.drained
                if level > 0:
                    self.model_executor.sleep(level)
                return None

            def wake_up(self, tags: list[str] | None = None) -> bool:
                tags = None if tags is None else [tag for tag in tags if tag != "scheduling"]
                if tags is None or tags:
                    self.model_executor.wake_up(tags)
                if awake := not self.model_executor.is_sleeping:
                    self.resume_scheduler()
                return awake

            def resume_scheduler(self) -> None:
                self.paused = False

            def get_weight_version(self) -> str:
                return self.name

            def set_weight_version(self, name: str) -> None:
                self.name = name

        class OfSeveral(EngineCore):
            """As vLLM's engine with data parallelism."""

            barriers = 0

            def resume_scheduler(self) -> None:
                super().resume_scheduler()
                self.barriers += 1

        assert note_sleep(EngineCore, Executor, "trainsync")
        assert note_sleep(EngineCore, Executor, "trainsync")  # vLLM calls plugins again
        self.drained: Future[None] = Future()
        self.core: Any = EngineCore()
        self.of_several: Any = OfSeveral()

    @property
    def name(self) -> str:
        return str(self.core.get_weight_version())


@pytest.fixture
def vllm() -> _Vllm:
    return _Vllm()


def test_weights_that_were_kept_have_their_name_again_when_the_server_is_awake(
    vllm: _Vllm,
) -> None:
    vllm.core.sleep(1)
    assert (vllm.name, vllm.told) == (ASLEEP, [True])
    assert vllm.core.wake_up()
    assert (vllm.name, vllm.told, vllm.core.paused) == ("7", [True, False], False)


def test_weights_that_were_discarded_are_not_computed_with_before_they_have_another_name(
    vllm: _Vllm,
) -> None:
    vllm.core.sleep(2)
    vllm.core.wake_up()
    assert (vllm.name, vllm.core.paused) == (DISCARDED, True)
    vllm.core.set_weight_version("8")  # the end of an update
    assert (vllm.name, vllm.core.paused) == ("8", False)
    vllm.core.sleep(1)
    vllm.core.wake_up()
    assert (vllm.name, vllm.core.paused) == ("8", False)


@pytest.mark.parametrize("resume", ["resume_scheduler", "wake_up"])
def test_a_server_that_waits_for_weights_can_be_resumed_by_hand(vllm: _Vllm, resume: str) -> None:
    vllm.core.sleep(2)
    vllm.core.wake_up()
    getattr(vllm.core, resume)(*([["scheduling"]] if resume == "wake_up" else []))
    assert (vllm.name, vllm.core.paused) == (DISCARDED, False)


def test_weights_of_two_versions_are_discarded_by_a_sleep_that_keeps_them(vllm: _Vllm) -> None:
    vllm.whole = False  # an update failed half-way
    vllm.core.sleep(1)
    vllm.core.wake_up()
    assert (vllm.name, vllm.core.paused) == (DISCARDED, True)


def test_a_server_whose_weights_alone_are_awake_is_asleep_and_can_be_loaded(vllm: _Vllm) -> None:
    vllm.core.sleep(2)
    assert not vllm.core.wake_up(["weights"])
    assert vllm.told == [True, False]
    vllm.core.set_weight_version("8")
    assert (vllm.name, vllm.core.paused) == (ASLEEP, True)
    assert vllm.core.wake_up(["kv_cache"])
    assert (vllm.name, vllm.core.paused) == ("8", False)


def test_a_second_sleep_discards_nothing_and_is_told_once(vllm: _Vllm) -> None:
    vllm.core.sleep(1)
    vllm.core.sleep(2)  # vLLM does nothing
    assert vllm.told == [True]
    vllm.core.wake_up()
    assert vllm.name == "7"


def test_a_sleeper_is_resumed_only_by_waking_it_up(vllm: _Vllm) -> None:
    for core in (vllm.core, vllm.of_several):
        core.sleep(1)
        core.resume_scheduler()  # an agent's update that met the sleep
        assert core.paused
        core.wake_up()
        assert not core.paused
    assert vllm.of_several.barriers == 1, "the others do not wait for one that sleeps"


def test_a_server_that_waits_for_its_requests_before_it_sleeps_is_called_asleep(
    vllm: _Vllm,
) -> None:
    vllm.core.sleep(1, mode="wait")
    assert vllm.name == ASLEEP
    vllm.drained.set_exception(RuntimeError("aborted"))
    assert vllm.name == "7"


def test_a_sleep_that_fails_is_one_that_only_waking_up_ends(vllm: _Vllm) -> None:
    vllm.broken = True
    with pytest.raises(AssertionError):
        vllm.core.sleep(1)
    assert vllm.name == ASLEEP, "some memory may be gone"
    vllm.core.wake_up()
    assert (vllm.name, vllm.told) == ("7", [True, False])


def test_a_sleep_that_workers_cannot_be_told_of_does_not_begin(vllm: _Vllm) -> None:
    vllm.untellable = True
    with pytest.raises(AttributeError):
        vllm.core.sleep(1)
    assert (vllm.name, vllm.told) == ("7", [True, False])


@pytest.mark.parametrize("backend", [None, "nccl"])
def test_engines_of_another_backend_stay_as_they_are(backend: str | None) -> None:
    vllm = _Vllm(backend)
    vllm.core.sleep(2)
    assert vllm.name == "7"
    vllm.core.resume_scheduler()
    assert not vllm.core.paused
    vllm.core.wake_up()
    assert (vllm.name, vllm.told) == ("7", [])


def test_a_vllm_without_the_names_is_left_as_it_is() -> None:
    class Executor:
        def sleep(self) -> str:
            return "as before"

    assert not note_sleep(type("EngineCore", (), {}), Executor, "trainsync")
    assert Executor().sleep() == "as before"
