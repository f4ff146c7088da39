"""vLLM's workers and drivers hear of its sleep, and nothing resumes it before it is awake."""

from types import SimpleNamespace
from typing import Any

import pytest
from trainsync.engines.servers.tags import ASLEEP, DISCARDED
from trainsync.integrations.vllm.sleeping import NOTE_SLEEP, note_sleep


class _Vllm:
    """Its two classes as in vLLM 0.32, and one engine of them."""

    def __init__(self, backend: str | None = "trainsync") -> None:
        told: list[bool] = []
        config = None if backend is None else SimpleNamespace(backend=backend)

        class Executor:
            vllm_config = SimpleNamespace(weight_transfer_config=config)

            def __init__(self) -> None:
                self.sleeping_tags: set[str] = set()

            @property
            def is_sleeping(self) -> bool:
                return bool(self.sleeping_tags)

            def collective_rpc(self, method: str, args: tuple[bool]) -> None:
                assert method == NOTE_SLEEP
                told.append(*args)

            def sleep(self, level: int = 1) -> None:
                if "weights" not in self.sleeping_tags:
                    assert not told or told[-1] or backend is None, "the workers hear of it before"
                    self.sleeping_tags |= {"weights", "kv_cache"}

            def wake_up(self, tags: list[str] | None = None) -> None:
                self.sleeping_tags -= set(tags or self.sleeping_tags)

        class EngineCore:
            def __init__(self) -> None:
                self.model_executor = Executor()
                self.paused = False
                self.name = "7"

            def sleep(self, level: int = 1) -> None:
                self.paused = True
                self.model_executor.sleep(level)

            def wake_up(self, tags: list[str] | None = None) -> bool:
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

        note_sleep(EngineCore, Executor, "trainsync")
        note_sleep(EngineCore, Executor, "trainsync")  # vLLM calls plugins again
        self.told = told
        self.core: Any = EngineCore()


def test_weights_that_were_kept_have_their_name_again_when_the_server_is_awake() -> None:
    vllm = _Vllm()
    vllm.core.sleep(1)
    assert (vllm.core.get_weight_version(), vllm.told) == (ASLEEP, [True])
    assert vllm.core.wake_up()
    assert (vllm.core.get_weight_version(), vllm.told) == ("7", [True, False])


def test_weights_that_were_discarded_have_lost_their_name() -> None:
    vllm = _Vllm()
    vllm.core.sleep(2)
    vllm.core.wake_up()
    assert vllm.core.get_weight_version() == DISCARDED
    vllm.core.set_weight_version("8")  # an update
    vllm.core.sleep(1)
    vllm.core.wake_up()
    assert vllm.core.get_weight_version() == "8"


def test_a_server_whose_weights_alone_are_awake_is_asleep_and_can_be_loaded() -> None:
    vllm = _Vllm()
    vllm.core.sleep(2)
    assert not vllm.core.wake_up(["weights"])
    assert vllm.told == [True, False]
    vllm.core.set_weight_version("8")
    assert vllm.core.get_weight_version() == ASLEEP
    assert vllm.core.wake_up(["kv_cache"])
    assert vllm.core.get_weight_version() == "8"
    assert vllm.told == [True, False]


def test_a_second_sleep_discards_nothing_and_is_told_once() -> None:
    vllm = _Vllm()
    vllm.core.sleep(1)
    vllm.core.sleep(2)  # vLLM does nothing
    vllm.core.wake_up()
    assert (vllm.core.get_weight_version(), vllm.told) == ("7", [True, False])


def test_a_sleeper_is_resumed_only_by_waking_it_up() -> None:
    vllm = _Vllm()
    vllm.core.sleep(1)
    vllm.core.resume_scheduler()  # an agent's update that met the sleep
    assert vllm.core.paused
    vllm.core.wake_up()
    assert not vllm.core.paused


@pytest.mark.parametrize("backend", [None, "nccl"])
def test_workers_of_other_engines_are_told_nothing(backend: str | None) -> None:
    vllm = _Vllm(backend)
    vllm.core.sleep(1)
    vllm.core.wake_up()
    assert vllm.told == []
