"""An agent with a server that fails in every way that servers do."""

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from trainsync.agent.admission import sources
from trainsync.agent.agent import Agent
from trainsync.engines.servers import kinds
from trainsync.engines.servers.errors import KEPT, TORN
from trainsync.engines.servers.vllm import VLLMServer
from trainsync.weights.errors import SharedMemoryError
from trainsync.weights.staging.area import StagingArea

from tests.unit.agent.conftest import Start, Watched, has
from tests.unit.agent.fake_server import FakeServer
from tests.unit.agent.runs import Run, weights_of
from tests.waiting import eventually

_UPDATES = 'trainsync_agent_updates_total{outcome="%s"}'


def fails(message: str, status: int = 500) -> Callable[[], tuple[int, Any]]:
    return lambda: (status, {"error": {"message": message}})


def test_a_server_follows_the_run_and_is_ready_with_each_version(
    run: Run, server: FakeServer, start: Start
) -> None:
    agent = start()
    eventually(lambda: agent.status["notReadyBecause"] == "no version is committed yet")
    assert not agent.ready
    for version in (1, 2, 5):
        run.commit(version)
        agent.until_ready_with(version)
        assert has(server, weights_of(version))
    assert server.loads == 3
    assert agent.metric("trainsync_agent_version") == 5
    assert agent.metric("trainsync_agent_newest_version") == 5
    assert agent.metric("trainsync_agent_lag") == 0
    assert agent.metric("trainsync_agent_ready") == 1
    assert agent.metric(_UPDATES % "updated") == 3
    size = sum(tensor.nbytes for tensor in weights_of(1).values())
    assert agent.metric("trainsync_agent_staged_bytes_total") == 3 * size
    assert agent.metric("trainsync_agent_pause_seconds_count") == 3
    assert agent.metric("trainsync_agent_last_update_timestamp_seconds") is not None
    assert agent.get("/healthz").status_code == 200
    assert agent.get("/nothing").status_code == 404


def test_a_new_agent_leaves_a_server_with_exactly_the_newest_bytes_alone(
    run: Run, server: FakeServer, start: Start
) -> None:
    run.commit(1)
    start().until_ready_with(1)
    start().until_ready_with(1)
    assert server.loads == 1


def test_a_server_that_has_the_newest_tag_and_lacks_the_adapter_is_not_ready(
    run: Run, server: FakeServer, start: Start, tmp_path: Path
) -> None:
    run.commit(1)
    start().until_ready_with(1)
    server.faults["/v1/models"] = lambda: (200, {"data": []})
    server.faults["/v1/load_lora_adapter"] = fails("not found", 404)
    file = tmp_path / "adapter_config.json"
    file.write_text('{"peft_type": "LORA", "r": 2}')
    agent = start("--adapter=mine", f"--adapter-config={file}")
    eventually(lambda: "takes no adapters" in str(agent.status["lastFailure"]), 60)
    assert "without our adapter mine" in agent.status["notReadyBecause"]
    assert not agent.ready


def test_a_step_that_was_trained_again_is_loaded_again(
    run: Run, server: FakeServer, start: Start
) -> None:
    run.commit(7)
    agent = start()
    agent.until_ready_with(7)
    run.start()
    run.commit(7, weights_of(70))
    eventually(lambda: has(server, weights_of(70)), 60)
    agent.until_ready_with(7)


def test_a_run_that_goes_back_is_followed(run: Run, server: FakeServer, start: Start) -> None:
    run.commit(3)
    run.checkpoint(3)
    run.commit(9)
    agent = start()
    agent.until_ready_with(9)
    assert run.start() == 3
    agent.until_ready_with(3)
    assert has(server, weights_of(3))


def test_a_restarted_server_gets_its_weights_before_it_is_ready_without_a_fetch(
    run: Run, server: FakeServer, start: Start
) -> None:
    run.commit(1)
    agent = start()
    agent.until_ready_with(1)
    server.stop()
    assert not agent.ready
    eventually(lambda: agent.metric("trainsync_agent_server_up") == 0)
    server.start()
    assert not agent.ready or has(server, weights_of(1))
    agent.until_ready_with(1)
    assert has(server, weights_of(1))
    assert agent.metric("trainsync_agent_staged_bytes_total") == sum(
        tensor.nbytes for tensor in weights_of(1).values()
    )


def test_versions_are_staged_while_the_server_is_away_so_that_one_that_starts_waits_for_no_fetch(
    run: Run, server: FakeServer, start: Start
) -> None:
    server.stop()
    agent = start()
    size = sum(tensor.nbytes for tensor in weights_of(1).values())
    for version in (1, 2):
        run.commit(version)
        eventually(
            lambda n=version: agent.metric("trainsync_agent_staged_bytes_total") == n * size, 60
        )
        eventually(lambda: agent.status["phase"] == "waiting")
    server.start()
    agent.until_ready_with(2)
    assert has(server, weights_of(2))
    assert agent.metric("trainsync_agent_staged_bytes_total") == 2 * size


def test_what_cannot_be_staged_while_the_server_is_away_is_told_and_tried_again(
    run: Run, server: FakeServer, start: Start
) -> None:
    run.commit(1)
    (shard,) = (run.directory / "global_step_1").rglob("*.pt")
    shard.write_bytes(bytes(len(shard.read_bytes())))
    server.stop()
    agent = start()
    eventually(lambda: (agent.metric(_UPDATES % "damaged") or 0) >= 1, 60)
    assert agent.get("/healthz").status_code == 200
    run.commit(2)
    server.start()
    agent.until_ready_with(2)


def test_a_paused_server_that_a_dead_agent_left_is_updated_in_full(
    run: Run, server: FakeServer, start: Start
) -> None:
    run.commit(1)
    start().until_ready_with(1)
    server.paused, server.weights = True, None
    agent = start()
    agent.until_ready_with(1)
    assert has(server, weights_of(1))
    assert not server.paused


def test_a_refused_version_is_not_tried_in_a_hot_loop_and_the_next_one_is(
    run: Run, server: FakeServer, start: Start
) -> None:
    run.commit(1)
    agent = start()
    agent.until_ready_with(1)
    server.faults["/init_weight_transfer_engine"] = fails(f"{KEPT}: another model")
    run.commit(2)
    eventually(lambda: (agent.metric(_UPDATES % "refused") or 0) >= 2, 60)
    failure = agent.status["lastFailure"]
    assert failure["outcome"] == "refused"
    assert "another model" in failure["message"]
    eventually(lambda: agent.ready)  # one step behind
    run.commit(3)
    eventually(lambda: "2 steps behind" in agent.get("/readyz").text)
    server.faults.clear()
    agent.until_ready_with(3)
    assert has(server, weights_of(3))
    assert agent.status["lastFailure"] is None
    assert server.calls.count("/init_weight_transfer_engine") < 10


@pytest.mark.parametrize("path", ["/update_weights", "/finish_weight_update", "/resume"])
def test_a_server_left_paused_is_mended_at_once(
    path: str, run: Run, server: FakeServer, start: Start
) -> None:
    failed: list[float] = []

    def once() -> tuple[int, Any] | None:
        if failed:
            return None
        failed.append(time.monotonic())
        return fails(TORN)()

    run.commit(1)
    server.faults[path] = once
    agent = start()
    agent.until_ready_with(1)
    assert has(server, weights_of(1))
    assert agent.metric(_UPDATES % "paused") == 1


@pytest.mark.parametrize("path", ["/pause", "/update_weights", "/weight_info"])
def test_a_server_that_hangs_ends_neither_the_agent_nor_its_answers(
    path: str,
    run: Run,
    server: FakeServer,
    start: Start,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        kinds,
        "VLLMServer",
        lambda url, **options: VLLMServer(url, resume_timeout=1.0, **options),
    )
    hanging = threading.Event()

    def hang() -> None:
        hanging.wait(30)

    server.faults[path] = hang
    run.commit(1)
    agent = start("--timeout=3", answer=1.0)
    eventually(lambda: path in server.calls)
    assert not agent.ready
    eventually(
        lambda: (
            agent.status["lastFailure"] is not None
            or "did not answer" in (agent.status["serverError"] or "")
        )
    )
    assert not agent.ready
    server.faults.clear()
    hanging.set()
    agent.until_ready_with(1)
    assert has(server, weights_of(1))


def test_a_server_of_another_kind_is_never_ready(
    run: Run, server: FakeServer, start: Start
) -> None:
    server.faults["/weight_info"] = fails("Not Found", 404)
    run.commit(1)
    agent = start("--serve-before-first-version")
    eventually(lambda: "404" in agent.status["serverError"])
    assert not agent.ready
    assert server.loads == 0


def test_before_the_first_version_a_server_serves_only_when_that_is_asked_for(
    run: Run, server: FakeServer, start: Start
) -> None:
    agent = start("--serve-before-first-version")
    eventually(lambda: agent.ready)
    run.commit(1)
    agent.until_ready_with(1)


def test_a_directory_that_comes_back_is_followed_again(
    run: Run, server: FakeServer, start: Start
) -> None:
    run.commit(1)
    agent = start("--blind-seconds=1")
    agent.until_ready_with(1)
    run.stop()
    away = run.directory.rename(run.directory.with_name("away"))
    eventually(lambda: "is not known for" in agent.get("/readyz").text, 60)
    assert agent.status["directoryError"]
    away.rename(run.directory)
    agent.until_ready_with(1)
    assert server.loads == 1


def test_damaged_weights_are_never_loaded_and_the_next_version_is(
    run: Run, server: FakeServer, start: Start
) -> None:
    run.commit(1)
    (shard,) = (run.directory / "global_step_1").rglob("*.pt")
    data = bytearray(shard.read_bytes())
    data[len(data) // 2] ^= 1
    shard.write_bytes(bytes(data))
    agent = start()
    eventually(lambda: (agent.metric(_UPDATES % "damaged") or 0) >= 1, 60)
    assert server.loads == 0
    run.commit(2)
    agent.until_ready_with(2)
    assert has(server, weights_of(2))


def test_a_full_memory_is_told_of_and_tried_again(
    run: Run, server: FakeServer, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage = StagingArea.stage

    def full(*_: Any, **__: Any) -> Any:
        raise SharedMemoryError("/dev/shm has no room for 1 bytes of weights")

    monkeypatch.setattr(StagingArea, "stage", full)
    run.commit(1)
    agent = start()
    eventually(lambda: (agent.metric(_UPDATES % "no_memory") or 0) >= 1, 60)
    assert "no room" in agent.status["lastFailure"]["message"]
    assert server.calls.count("/pause") == 0
    monkeypatch.setattr(StagingArea, "stage", stage)
    agent.until_ready_with(1)


def test_an_error_that_nobody_thought_of_does_not_end_the_agent(
    run: Run, server: FakeServer, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage = StagingArea.stage
    monkeypatch.setattr(StagingArea, "stage", lambda *_: 1 / 0)
    run.commit(1)
    agent = start()
    eventually(lambda: (agent.metric(_UPDATES % "error") or 0) >= 1, 60)
    monkeypatch.setattr(StagingArea, "stage", stage)
    agent.until_ready_with(1)


def test_a_version_superseded_while_it_is_fetched_is_dropped_but_not_two_in_a_row(
    run: Run, server: FakeServer, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetched: list[int] = []
    started: list[Watched] = []
    read = sources.read_weights

    def slowly(*arguments: Any, **options: Any) -> dict[str, torch.Tensor]:
        tensors = read(*arguments, **options)
        version = len(fetched) + 1
        fetched.append(version)
        eventually(lambda: bool(started))
        if version <= 3:
            run.commit(version + 1)
            eventually(lambda: started[0].status["newestVersion"] == version + 1)
        return tensors

    monkeypatch.setattr(sources, "read_weights", slowly)
    run.commit(1)
    started.append(start("--max-staleness=10"))
    started[0].until_ready_with(4)
    assert fetched == [1, 2, 3, 4]
    assert has(server, weights_of(4))
    assert server.loads == 2  # the second and the fourth
    assert started[0].metric(_UPDATES % "superseded") == 2


def test_weights_are_converted_when_that_is_asked_for(
    run: Run, server: FakeServer, start: Start
) -> None:
    run.commit(1)
    start("--dtype=bfloat16").until_ready_with(1)
    wanted = {name: tensor.to(torch.bfloat16) for name, tensor in weights_of(1).items()}
    assert has(server, wanted)


def test_an_agent_ends_in_seconds_while_a_server_hangs_in_an_update(
    run: Run, server: FakeServer, start: Start, memory: Path
) -> None:
    hanging = threading.Event()

    def hang() -> None:
        hanging.wait(30)

    server.faults["/update_weights"] = hang
    run.commit(1)
    agent = start(stop=0.5)
    eventually(lambda: "/update_weights" in server.calls)
    assert not agent.agent.close()
    assert not list(memory.iterdir())
    server.faults.clear()
    hanging.set()
    assert isinstance(agent.agent, Agent)
    start().until_ready_with(1)
    assert has(server, weights_of(1))
