"""The fault harness can fail: each promise that is broken on the disk is noticed."""

from collections.abc import Callable
from pathlib import Path

import pytest
from trainsync.api.protocol import SaveKind
from trainsync.storage.layout import RunDirectory

from tests.faults.plan import Plan, Shape, draw
from tests.faults.processes import BrokenError
from tests.faults.promises import check_receipts
from tests.faults.scenarios import ALL
from tests.faults.training import Trainer, host
from tests.faults.trial import Trial

CHECKPOINT = SaveKind.CHECKPOINT


@pytest.fixture
def plan() -> Plan:
    seed = next(s for s in range(1000) if _fits(draw(s, split=False)))
    return draw(seed, split=False)


def _fits(plan: Plan) -> bool:
    shapes = [step.shape for step in plan.history]
    return plan.keep is None and shapes == [Shape.CHECKPOINT, Shape.CHECKPOINT] and plan.ranks > 1


@pytest.fixture
def trial(tmp_path: Path, plan: Plan) -> Trial:
    """Two checkpoints are committed."""
    trial = Trial(plan.seed, tmp_path, "nowhere")
    trial.run.root.mkdir()
    where = trial.attempt(plan)
    client = host(where, plan)
    Trainer(where, plan, client, range(plan.ranks)).train(plan.history)
    client.close()
    return trial


def a_file(run: RunDirectory) -> Path:
    """The largest shard of the newest step."""
    return max((run.step(20) / "actor").iterdir(), key=lambda path: path.stat().st_size)


def flip(run: RunDirectory) -> None:
    data = bytearray(a_file(run).read_bytes())
    data[len(data) // 2] ^= 1
    a_file(run).write_bytes(data)


def remove_manifest(run: RunDirectory) -> None:
    run.manifest(CHECKPOINT, 20).unlink()


def point_back(run: RunDirectory) -> None:
    run.pointer(CHECKPOINT).write_text("10\n")


def remove_pointer(run: RunDirectory) -> None:
    run.pointer(CHECKPOINT).unlink()


def tear_pointer(run: RunDirectory) -> None:
    run.pointer(CHECKPOINT).write_text("2x")


def remove_the_newest(run: RunDirectory) -> None:
    run.step(20).rename(run.root / "gone")


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (flip, "is torn"),
        (remove_manifest, "has no manifest"),
        (point_back, "went back"),
        (remove_pointer, "is gone"),
        (tear_pointer, "is damaged"),
        (remove_the_newest, "has no manifest"),
    ],
)
def test_what_is_wrong_on_the_disk_is_noticed(
    trial: Trial, plan: Plan, spoil: Callable[[RunDirectory], None], said: str
) -> None:
    assert trial.check(plan)[CHECKPOINT] == [10, 20]
    spoil(trial.run)
    with pytest.raises(BrokenError, match=said):
        trial.check(plan)


def test_what_a_stranger_committed_is_noticed(trial: Trial, plan: Plan) -> None:
    trial.owners.clear()
    with pytest.raises(BrokenError, match="stranger"):
        trial.check(plan)


def test_weights_of_another_moment_are_noticed_though_all_digests_agree(
    tmp_path: Path, plan: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    trial = Trial(plan.seed, tmp_path, "nowhere")
    trial.run.root.mkdir()
    where = trial.attempt(plan)
    client = host(where, plan)
    real = Plan.state

    def late(self: Plan, attempt: int, step: int, component: str, rank: int) -> dict[str, object]:
        return real(self, attempt, step + 1, component, rank)

    with monkeypatch.context() as patch:
        patch.setattr(Plan, "state", late)
        Trainer(where, plan, client, range(plan.ranks)).train(plan.history)
    client.close()
    with pytest.raises(BrokenError, match="does not hold what attempt 0 had"):
        trial.check(plan)


def test_a_receipt_without_its_file_is_noticed(
    tmp_path: Path, plan: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    trial = Trial(plan.seed, tmp_path, "nowhere")
    trial.run.root.mkdir()
    where = trial.attempt(plan)
    # The monitor scans the disk only at its start and gets no hint, so it would abort.
    client = host(where, plan, tick_seconds=3600)
    monkeypatch.setattr(client, "receipt", lambda _hint: None)
    trainer = Trainer(where, plan, client, range(plan.ranks))
    trainer.coordinators.pop(plan.ranks - 1)
    trainer.save(plan.history[0])
    trainer.flush()
    check_receipts(trial.run, where.owner)
    save = trial.run.save(0, where.owner.incarnation, CHECKPOINT, 10)
    next(save.files.glob("by-*/actor/*")).unlink()
    with pytest.raises(BrokenError, match="its file is not"):
        check_receipts(trial.run, where.owner)


def test_each_fault_is_tried_as_often_as_asked_and_each_point_equally_often() -> None:
    for scenario in ALL.values():
        seeds = list(scenario.seeds(12345, 200))
        assert len(seeds) >= 200 * scenario.faults
        counts = dict.fromkeys(scenario.points, 0)
        for seed in seeds:
            counts[scenario.point(seed)] += 1
        assert len(set(counts.values())) == 1
