"""Weights are published and a checkpoint is saved at one step, by whatever comes first."""

import itertools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import ray
import torch.distributed as dist
from trainsync import WeightPublisher, all_ranks
from trainsync.api import env
from trainsync.api.protocol import SaveKind
from trainsync.storage.layout import RunDirectory
from trainsync.storage.saves.manifest import check_manifest, read_manifest

from tests.distributed.engines.fsdp_models import content
from tests.distributed.processes.forked import preload
from tests.distributed.ranks import run_ranks, values_of
from tests.distributed.verl.scenarios.stage import Stage, published, refusal

pytest.importorskip("verl", reason="the extra `verl` is not installed")

preload("ray")

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(400)]

METHODS = ["memory", "nccl", "checkpoint"]
PAIRS = [
    f"{first} then {second}"
    for pair in itertools.combinations(["publisher", "manager", "coordinator"], 2)
    for first, second in (pair, pair[::-1])
]


def at_one_step(directory: Path, ray_arguments: dict[str, Any]) -> dict[str, Any]:
    """What each pair raised, by method; every step's checkpoint is waited for."""
    stage = Stage(directory)
    ray.init(**ray_arguments)
    engine = stage.verl.make_engine(stage.model)
    return {
        method: {
            how: _at_one_step(stage, engine, method, how == "shared") for how in ("shared", "own")
        }
        for method in METHODS
    }


def _at_one_step(stage: Stage, engine: Any, method: str, shared: bool) -> dict[str, Any]:
    from trainsync.engines.verl.install import install_checkpoint_manager

    os.environ |= {env.SYNC_METHOD: method, env.SYNC_TIMEOUT_SECONDS: "60"}
    run, found = stage.run(f"{method}-{shared}"), {}
    synchronizer = run.synchronizer()
    coordinator = run.context.coordinator()
    given = coordinator if shared else None
    manager = install_checkpoint_manager(engine, run.context, synchronizer, given)
    publisher = WeightPublisher(run.context, engine, given)

    def save(step: int) -> None:
        weights = engine.module.state_dict()
        coordinator.save_async("model", weights, step, is_state_dict=True)
        if stage.rank == 0:
            models = all_ranks("model", world_size=2)
            coordinator.register(step, state_dict_participants=models)

    acts: dict[str, Callable[[int], Any]] = {
        "publisher": publisher.publish,
        "manager": lambda step: manager.save_checkpoint(run.path(step), global_step=step),
        "coordinator": save,
    }
    for step, pair in enumerate(PAIRS, start=1):
        stage.verl.train(engine, step)
        found[pair] = [refusal(acts[name], step) for name in pair.split(" then ")]
        found[pair].append(refusal(manager.wait_on_save_thread, 60))
        found[pair].append(refusal(coordinator.wait_all, 60))
        if stage.rank == 0:
            is_state_dict = "manager" not in pair
            if not is_state_dict or "coordinator" in pair or method == "checkpoint":
                waited = run.context.monitor.save_status(
                    SaveKind.STATE_DICT if is_state_dict else SaveKind.CHECKPOINT, step, 30
                )
                found[pair].append(waited.state.value)
        dist.barrier()
    publisher.close()
    run.close()
    return found


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("same-step")


@pytest.fixture(scope="module")
def outcomes(place: Path, ray_of_ranks: dict[str, Any]) -> list[dict[str, Any]]:
    return values_of(run_ranks(at_one_step, place, ray_of_ranks, seconds=300))


@pytest.mark.parametrize("how", ["shared", "own"])
@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize("method", METHODS)
def test_both_succeed_at_one_step_whichever_comes_first(
    outcomes: Any, place: Path, method: str, pair: str, how: str
) -> None:
    for rank in outcomes:
        for outcome in rank[method][how][pair]:
            assert outcome in (("", "nothing was raised"), "committed")
    if "manager" in pair:
        run = RunDirectory(place / f"{method}-{how == 'shared'}")
        step = PAIRS.index(pair) + 1
        check_manifest(
            run, read_manifest(run, SaveKind.CHECKPOINT, step).manifest, with_digest=True
        )


def by_commit(directory: Path, ray_arguments: dict[str, Any]) -> dict[str, Any]:
    """Method `checkpoint`, with a manager that knows the Synchronizer: two attempts."""
    stage = Stage(directory)
    os.environ |= {env.SYNC_METHOD: "checkpoint", env.SYNC_TIMEOUT_SECONDS: "60"}
    ray.init(**ray_arguments)
    found: dict[str, Any] = {"taken": []}
    for attempt, steps in enumerate(([0, 1], [1, 2])):
        engine = stage.verl.make_engine(stage.model)
        run = stage.run("by-commit")
        resume = run.context.resume() if stage.rank == 0 else None
        synchronizer = run.synchronizer()
        manager = run.install(engine, synchronizer=synchronizer)
        found[f"upload {attempt}"] = refusal(manager.upload_state_dict, 9)
        if attempt == 1:
            assert stage.rank != 0 or (resume is not None and resume.step == 1)
            manager.load_checkpoint(run.path(1))
        explorer = run.context.explorer(f"explorer-{attempt}") if stage.rank == 0 else None
        for step in steps:
            if step != steps[0]:
                stage.verl.train(engine, step)
            found[f"{attempt}: {step}"] = refusal(manager.save_state_dict, run.path(step), step)
            full = {name: t.full_tensor() for name, t in engine.module.state_dict().items()}
            if explorer is not None:
                weights = explorer.wait_and_fetch(step - 1)
                same = {name: content(t) for name, t in weights.state_dict.items()}
                expected = {name: content(t) for name, t in full.items()}
                found["taken"].append((weights.version, same == expected))
                explorer.acknowledge(weights)
            dist.barrier()
        manager.save_checkpoint(run.path(steps[-1]), global_step=steps[-1])
        manager.wait_on_save_thread(60)
        assert published(synchronizer) == steps[-1]
        if explorer is not None:
            explorer.leave()
        run.close()
    return found


def test_with_method_checkpoint_explorers_get_what_a_manager_saves_from_the_first_version_on(
    tmp_path: Path, ray_of_ranks: dict[str, Any]
) -> None:
    first, second = values_of(run_ranks(by_commit, tmp_path, ray_of_ranks, seconds=200))
    for rank in (first, second):
        for name in ("0: 0", "0: 1", "1: 1", "1: 2"):
            assert rank[name] == ("", "nothing was raised"), name
        for attempt in (0, 1):
            error, text = rank[f"upload {attempt}"]
            assert error == "ValueError"
            assert "expected save_state_dict, since explorers take committed weights" in text
    assert first["taken"] == [(0, True), (1, True), (1, True), (2, True)]
