"""The example end to end, on this machine: real trainers, explorers, commits, and a real kill.

The run that nothing disturbs is under torchrun, and the one that loses a trainer under Ray: that
both take the same steps also says that the two ways to start are one training.
"""

import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import ray
from tiny_grpo.probes import PROBE_TOLERANCE
from trainsync.api import env
from trainsync.api.protocol import SaveKind
from trainsync.storage.saves.manifest import check_manifest, read_manifest

from tests.distributed.processes.forked import preload
from tests.distributed.processes.forked_workers import forked_python
from tests.distributed.ranks import run_ranks, values_of
from tests.distributed.tiny_run import CONFIG, DEADLINE, INTERVAL, Run, wait_until

preload("ray", "transformers.models.qwen2.modeling_qwen2")

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, ray_address: str) -> Run:
    """A whole run under torchrun."""
    run = Run(tmp_path_factory.mktemp("undisturbed"), ray_address)
    torchrun = ("torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--no-python")
    code = run.end(run.start(*torchrun, *forked_python(), "-m", "tiny_grpo.train_torchrun"))
    assert code == 0, run.log.read_text()[-4000:]
    return run


def test_explorers_compute_what_the_trainer_computes_at_every_version(undisturbed: Run) -> None:
    steps = undisturbed.steps
    assert [(step.step, step.version) for step in steps] == [
        (number, number - 1) for number in range(1, CONFIG.steps + 1)
    ]
    assert max(step.metrics["probe_max_abs_diff"] for step in steps) <= PROBE_TOLERANCE


def test_every_due_checkpoint_is_committed_whole(undisturbed: Run) -> None:
    assert undisturbed.committed == list(range(INTERVAL, CONFIG.steps + 1, INTERVAL))
    for step in undisturbed.committed:
        manifest = read_manifest(undisturbed.directory, SaveKind.CHECKPOINT, step).manifest
        check_manifest(undisturbed.directory, manifest, with_digest=True)
        assert {Path(entry.path).name for entry in manifest.files} == {
            f"{component}_world_size_2_rank_{rank}.pt"
            for component in ("model", "optim", "extra_state")
            for rank in (0, 1)
        }


def test_a_run_that_lost_a_trainer_takes_the_same_steps_bit_for_bit(
    undisturbed: Run, tmp_path: Path, ray_address: str
) -> None:
    run = Run(tmp_path, ray_address)
    process = run.start("tiny_grpo.train", options=("--max-restarts", "0"))
    _wait_for_steps_after_a_commit(run, process)
    os.kill(run.started[0].trainer_pids[-1], signal.SIGKILL)
    assert run.end(process) != 0, "the attempt went on without one of its trainers"
    assert len(run.steps) < CONFIG.steps
    committed = run.committed[-1]

    assert run.end(run.start("tiny_grpo.train")) == 0, run.log.read_text()[-4000:]

    first, second = run.started
    assert second.attempt == first.attempt + 1
    # A save that was whole on disk when the trainer died is committed by the next attempt: perhaps
    # that of the step which the driver had not written down yet.
    told = max(s.step for s in run.steps if s.attempt == first.attempt)
    assert committed <= second.step <= told + 1
    expected = {step.step: step.metrics["loss"] for step in undisturbed.steps}
    assert len(set(expected.values())) > CONFIG.steps // 2, "losses too alike to tell steps apart"
    assert {step.step for step in run.steps} == set(expected)
    for step in run.steps:
        assert step.metrics["loss"] == expected[step.step], f"step {step.step}"
    assert run.committed[-1] == CONFIG.steps


# What is proven is that weights and answers go on flowing: one trainer, in the process that drives,
# and hardly a base model.
SMALL = replace(CONFIG, steps=10, trainers=1, base_steps=1, prompts=4, group_size=4)

STYLES = {
    "fixed": {env.SYNC_INTERVAL: "2", env.SYNC_OFFSET: "1"},
    "trainer_driven": {},
    "explorer_driven": {env.SYNC_INTERVAL: "2"},
    "fully_async": {env.SYNC_MAX_STALENESS: "2"},
}
# Of the styles, when an explorer is killed.
METHODS = {
    "fixed": "nccl",
    "trainer_driven": "memory",
    "explorer_driven": "memory",
    "fully_async": "checkpoint",
}


def train_here(environ: dict[str, str], arguments: list[str]) -> None:
    """As torchrun would start the only rank, in a process that has imported torch already."""
    from tiny_grpo.train_torchrun import main

    os.environ |= environ
    sys.argv[1:] = arguments
    main()
    ray.shutdown()


@pytest.mark.parametrize("style", STYLES)
def test_a_run_of_each_style_goes_on_when_an_explorer_is_killed(
    style: str, tmp_path: Path, ray_address: str
) -> None:
    sync = {**STYLES[style], env.SYNC_STYLE: style, env.SYNC_METHOD: METHODS[style]}
    run = Run(tmp_path, ray_address, **sync)
    with ThreadPoolExecutor(1) as aside:
        training = aside.submit(
            run_ranks,
            train_here,
            os.environ | run.environment,
            run.arguments(SMALL),
            world_size=1,
            seconds=DEADLINE,
        )
        wait_until(lambda: training.done() or len(run.steps) >= 3)
        disturbed = not training.done()
        if disturbed:
            os.kill(run.started[0].explorer_pids[-1], signal.SIGKILL)
        values_of(training.result())
    assert disturbed, "it ended before it could be disturbed"

    (started,) = run.started
    assert [step.step for step in run.steps] == list(range(1, SMALL.steps + 1))
    assert max(step.metrics["probe_max_abs_diff"] for step in run.steps) <= PROBE_TOLERANCE
    assert len({step.version for step in run.steps}) > 2, "explorers took no new weights"
    staleness = max(step.metrics["staleness"] for step in run.steps)
    assert staleness <= {"fixed": 2, "fully_async": 2}.get(style, SMALL.steps)
    assert (started.attempt, run.committed[-1]) == (0, SMALL.steps)


# With the tests above and the e2e tests, every method with every style. One explorer: each takes
# four seconds of a processor to start.
PAIRS = [
    ("nccl", "trainer_driven"),
    ("nccl", "fully_async"),
    ("checkpoint", "fixed"),
    ("checkpoint", "explorer_driven"),
]


@pytest.mark.parametrize(("method", "style"), PAIRS)
def test_a_run_of_each_method_and_style_takes_every_step_with_new_weights(
    method: str, style: str, tmp_path: Path, ray_address: str
) -> None:
    sync = {**STYLES[style], env.SYNC_STYLE: style, env.SYNC_METHOD: method}
    run = Run(tmp_path, ray_address, **sync)
    config = replace(SMALL, steps=5, explorers=1)
    environ, arguments = os.environ | run.environment, run.arguments(config)
    values_of(run_ranks(train_here, environ, arguments, world_size=1, seconds=DEADLINE))
    assert [step.step for step in run.steps] == list(range(1, config.steps + 1))
    assert max(step.metrics["probe_max_abs_diff"] for step in run.steps) <= PROBE_TOLERANCE
    assert len({step.version for step in run.steps}) > 1, "explorers took no new weights"


def _wait_for_steps_after_a_commit(run: Run, process: subprocess.Popen[bytes]) -> None:
    def there() -> bool:
        assert process.poll() is None, run.log.read_text()[-4000:]
        return bool(run.committed and run.steps and run.steps[-1].step > run.committed[-1])

    wait_until(there)
