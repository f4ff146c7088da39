"""Two workers of one server, each of which has a part of every layer, serve the adapter of a run,
which an agent brings through a bucket of a real S3 server."""

import shutil
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path

import pytest
from safetensors.torch import load_file
from trainsync import RunContext
from trainsync.api import env
from trainsync.api.protocol import SaveKind, SaveState
from trainsync.engines.servers.adapter import Adapter
from trainsync.engines.servers.errors import UpdateRefusedError
from trainsync.engines.servers.vllm_adapter import VLLMAdapterServer
from trainsync.storage.objects.opening import open_store
from trainsync.weights.delta.compiling import prepare
from trainsync.weights.staging.area import StagingArea
from trainsync.weights.transports.anchors.index import Owner
from trainsync.weights.transports.anchors.publisher import AnchorPublisher
from trainsync.weights.transports.shared_memory.segment import SHARED_MEMORY

from tests.vllm.conftest import APART, TOLERANCE
from tests.vllm.support.adapters import (
    TARGETS,
    Off,
    Weights,
    adapter_of,
    config_file,
    cut,
    distance,
    in_peft_model,
    merged,
)
from tests.vllm.support.agent_process import AgentProcess, ending_in_order
from tests.vllm.support.server import (
    CALL_SECONDS,
    MODEL,
    START_SECONDS,
    Server,
    environment,
    serve,
    vllm_environment,
)
from tests.vllm.support.storage import URL, Storage
from tests.waiting import eventually

_DRIVEN = "driven"
_PUBLISH_SECONDS = 60.0
# Versions take turns, so that each leaves layers out that the one before had. All in one would
# round too much for TOLERANCE.
_OTHERS = ("k_proj", "o_proj", "gate_proj", "up_proj")


@pytest.fixture(scope="module")
def two_workers(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    started = serve(
        model, tmp_path_factory.mktemp("workers"), "--enable-lora", "--max-loras", "3",
        "--tensor-parallel-size", "2",
        # vLLM binds a worker to each NUMA node, and refuses more workers than nodes without this.
        variables={"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1", "VLLM_CPU_OMP_THREADS_BIND": "0|1"},
    )  # fmt: skip
    yield started
    started.stop()
    for home in SHARED_MEMORY.glob("trainsync-adapter-*"):
        shutil.rmtree(home)


@pytest.fixture
def base(model: Path) -> Weights:
    """The weights of the server's base model, which stay."""
    return load_file(model / "model.safetensors")


@pytest.fixture
def off(two_workers: Server, model: Path, tmp_path: Path) -> Off:
    return lambda name, weights: distance(two_workers, model, name, weights, tmp_path)


def test_each_worker_serves_its_part_of_each_version(
    two_workers: Server, base: Weights, off: Off, tmp_path: Path
) -> None:
    mine = Adapter.read(_DRIVEN, config_file(tmp_path, (*TARGETS, *_OTHERS)))
    adapters = [
        adapter_of(base, number, TARGETS if number % 2 else _OTHERS) for number in range(31, 35)
    ]
    area = StagingArea()
    try:
        with VLLMAdapterServer(
            two_workers.url, mine, SHARED_MEMORY, timeout=CALL_SECONDS
        ) as driver:
            for version, (adapter, later) in enumerate(pairwise(adapters), 31):
                driver.update(version, area.stage(version, in_peft_model(adapter)))
                assert off(_DRIVEN, merged(base, adapter)) < TOLERANCE
                assert off(_DRIVEN, merged(base, later)) > APART
                assert off(MODEL, base) < TOLERANCE
            with pytest.raises(UpdateRefusedError, match="do not fit the model"):
                driver.update(34, area.stage(34, cut(adapter)))  # as if for one worker's part
            assert not driver.is_paused()
            assert off(_DRIVEN, merged(base, adapter)) < TOLERANCE
            # Not refused for what the workers said of the one before.
            driver.update(34, area.stage(34, in_peft_model(adapters[-1])))
            assert off(_DRIVEN, merged(base, adapters[-1])) < TOLERANCE
    finally:
        area.close()


Start = Callable[..., AgentProcess]


@pytest.fixture
def start(two_workers: Server, tmp_path: Path) -> Iterator[Start]:
    """Starts agents of the server, which all end in order, for an adapter of a name."""
    python = vllm_environment() / "bin" / "python"
    with ending_in_order() as agents:

        def do(name: str, *options: str) -> AgentProcess:
            given: list[str | Path] = ["--server", two_workers.url, *options, "--adapter", name]
            given += ["--adapter-config", config_file(tmp_path)]
            agents.append(AgentProcess(python, environment(tmp_path / "plugin"), given))
            return agents[-1]

        yield do


def test_workers_follow_an_adapter_through_a_store_whose_s3_server_is_killed_and_comes_back(
    storage: Storage, base: Weights, start: Start, off: Off
) -> None:
    assert prepare(START_SECONDS, compact=True)
    trainer = AnchorPublisher(open_store(URL), Owner("run-uid", 1, "aaaa0000"), anchor_every=3)

    def publish(step: int) -> None:
        tensors = in_peft_model(adapter_of(base, 40 + step))
        trainer.publish(step, lambda: list(tensors.items()), _PUBLISH_SECONDS)

    try:
        publish(1)
        agent = start("stored", "--store", URL, "--store-endpoint", storage.endpoint)
        agent.until_ready_with(1)
        assert off("stored", merged(base, adapter_of(base, 41))) < TOLERANCE
        publish(2)
        agent.until_ready_with(2)
        storage.kill()
        eventually(lambda: agent.status.get("storeError") is not None, CALL_SECONDS)
        assert off("stored", merged(base, adapter_of(base, 42))) < TOLERANCE
        storage.start()
        for step in (3, 5):
            publish(step)
            agent.until_ready_with(step)
            assert off("stored", merged(base, adapter_of(base, 40 + step))) < TOLERANCE
            assert off("stored", merged(base, adapter_of(base, 41 + step))) > APART
    finally:
        trainer.close()


def test_workers_follow_an_adapter_that_is_committed_in_a_bucket_also_with_another_agent(
    storage: Storage, base: Weights, start: Start, off: Off
) -> None:
    settings = {env.CHECKPOINT_DIR: URL, env.RUN_NAME: "a", env.SYNC_METHOD: "checkpoint"}
    with RunContext.from_env(URL, environ=settings) as ctx:
        ctx.resume()
        saving = ctx.coordinator(0, 1)

        def commit(step: int) -> None:
            saving.register(step, state_dict_participants=[("model", 0)])
            tensors = in_peft_model(adapter_of(base, 50 + step))
            saving.save_async("model", tensors, step, True)
            saving.wait_all(_PUBLISH_SECONDS)
            state = ctx.monitor.save_status(SaveKind.STATE_DICT, step, _PUBLISH_SECONDS).state
            assert state is SaveState.COMMITTED

        commit(1)
        agent = start("committed", "--directory", URL)
        agent.until_ready_with(1)
        assert off("committed", merged(base, adapter_of(base, 51))) < TOLERANCE
        assert agent.stop() == 0
        commit(2)
        again = start("committed", "--directory", URL)
        again.until_ready_with(2)
        assert off("committed", merged(base, adapter_of(base, 52))) < TOLERANCE
