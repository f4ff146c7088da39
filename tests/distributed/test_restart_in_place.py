"""Ranks of the example are killed, for real, and their run goes on in the same attempt and job.

``TRAINSYNC_RANK_KILLS`` says how often ranks are killed in each phase of a step together.
"""

import os
import random
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
from tiny_grpo.history import Started
from tiny_grpo.probes import PROBE_TOLERANCE
from trainsync.api import env
from trainsync.storage.saves.claims import LOCAL_UID, read_claims
from trainsync.storage.saves.incarnations import generation

from tests.distributed.restarts import pauses
from tests.distributed.tiny_run import CONFIG, Run

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(900)]

STEPS = 22
SMALL = replace(CONFIG, steps=STEPS)
# By rank; every phase of a step, of a save, of keeping in memory, and of a restart itself.
KILLS = (
    "step-2.1",
    "staged-4.0",
    "opened-6.1",
    "receipt-8.0",
    "sealing-10.1",
    "publish-12.0",
    "step-14.0",
    "step-16.1",
    "load-13.0",
    "load-14.0",
    f"finish-{STEPS}.1",
)
ROUNDS = -(-int(os.environ.get("TRAINSYNC_RANK_KILLS", "0")) // len(KILLS)) or 1


def kills_of(number: int) -> tuple[str, ...]:
    """`KILLS`; in rounds after the first those of other ranks, and in another order."""
    if number == 0:
        return KILLS
    draws = random.Random(number)
    phases = [kill.partition("-")[0] for kill in KILLS[:-3]]
    draws.shuffle(phases)
    steps = [f"{phase}-{2 * index + 2}" for index, phase in enumerate(phases)]
    *loads, end = (kill.partition(".")[0] for kill in KILLS[-3:])
    loading = draws.randrange(SMALL.trainers)  # one rank: two would die in one load
    ranked = [f"{kill}.{draws.randrange(SMALL.trainers)}" for kill in (*steps, end)]
    return (*ranked, *(f"{kill}.{loading}" for kill in loads))


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, ray_address: str) -> Run:
    return trained(tmp_path_factory.mktemp("undisturbed"), ray_address, ())


def trained(directory: Path, address: str, kills: tuple[str, ...], **sync: str) -> Run:
    """A run to its end, in which ranks are killed."""
    memory = {
        env.CHECKPOINT_INTERVAL: "1",
        env.CHECKPOINT_MEMORY: "64Mi",
        env.CHECKPOINT_MEMORY_DIR: str(directory / "memory"),
    }
    run = Run(directory, address, **sync)
    run.environment |= memory
    for name in ("kills", "memory"):
        (directory / name).mkdir()
    for kill in kills:
        (directory / "kills" / kill).touch()
    process = run.start(
        "tests.distributed.killed_ranks", config=SMALL, options=("--max-restarts", "20")
    )
    assert run.end(process) == 0, run.log.read_text()[-6000:]
    left = sorted(path.name for path in (directory / "kills").iterdir())
    assert not left, f"no rank came to {left}"
    return run


def losses(run: Run) -> Mapping[int, set[float]]:
    found: dict[int, set[float]] = {}
    for step in run.steps:
        found.setdefault(step.step, set()).add(step.metrics["loss"])
    return found


def check_attempt(run: Run, kills: int) -> None:
    (claim,) = read_claims(run.directory, LOCAL_UID)
    assert (claim.attempt, generation(claim.incarnation)) == (0, kills)
    assert {step.attempt for step in run.steps} == {0}
    assert max(step.metrics["probe_max_abs_diff"] for step in run.steps) <= PROBE_TOLERANCE
    assert run.committed[-1] == STEPS
    assert not re.search(r"explorer \d+ is gone", run.log.read_text()), "an explorer ended"


@pytest.mark.parametrize("number", range(ROUNDS))
def test_a_run_whose_ranks_are_killed_in_every_phase_takes_the_same_steps_bit_for_bit(
    undisturbed: Run, tmp_path: Path, ray_address: str, number: int
) -> None:
    kills = kills_of(number)
    assert len(set(kills)) == len(KILLS)
    run = trained(tmp_path, ray_address, kills)
    for kill, seconds in pauses(run):
        print(f"{kill}: the next step ended {seconds:.1f} s after the kill")
    check_attempt(run, len(kills))
    expected = losses(undisturbed)
    assert len(set().union(*expected.values())) > STEPS // 2, "too alike to tell steps apart"
    assert losses(run) == expected
    trained_to = 0
    for record in run.records:
        if isinstance(record, Started):
            # A save goes on behind the next step: of both, nothing may be whole in memory.
            assert trained_to - 2 <= record.step <= trained_to, "more than the save in flight"
            print(f"a restart after step {trained_to} lost {trained_to - record.step} ended steps")
        else:
            assert record.step == trained_to + 1 or record.step <= trained_to
        trained_to = record.step


@pytest.mark.parametrize(
    ("method", "style", "spares"),
    [
        ("checkpoint", "fixed", "false"),
        ("memory", "fully_async", "false"),
        ("nccl", "fully_async", "true"),
    ],
)
def test_explorers_of_each_method_go_on_with_the_restarted_trainers(
    method: str,
    style: str,
    spares: str,
    undisturbed: Run,
    tmp_path: Path,
    ray_address: str,
) -> None:
    sync = {env.SYNC_METHOD: method, env.SYNC_STYLE: style, env.WARM_SPARE: spares}
    if style == "fully_async":
        sync |= {env.SYNC_MAX_STALENESS: "2"}
    kills = ("staged-8.0", "step-12.1")
    run = trained(tmp_path, ray_address, kills, **sync)
    check_attempt(run, len(kills))
    were_spares = "spare" in (tmp_path / "times").read_text()
    assert were_spares is (spares == "true"), "which processes the ranks were"
    assert set(losses(run)) == set(range(1, STEPS + 1))
    if style == "fixed":
        assert losses(run) == losses(undisturbed)
    else:
        assert max(step.metrics["staleness"] for step in run.steps) <= 2
