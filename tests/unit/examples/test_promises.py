"""Every promise of the demo must be seen to break."""

from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import pytest
from tiny_grpo.history import Started, Step
from tiny_grpo.probes import PROBE_TOLERANCE
from tiny_grpo.promises import Kill, check
from trainsync.api.protocol import SaveKind
from trainsync.storage.digest import file_digest
from trainsync.storage.layout import RunDirectory
from trainsync.storage.saves.manifest import Manifest, write_manifest
from trainsync.storage.saves.receipts import FileEntry, Participant

TOTAL = 12
KILL = Kill(step=10, committed=9)
Records = list[Started | Step]


def make_step(attempt: int, step: int, **metrics: float) -> Step:
    defaults = {"loss": step / 7, "reward": 0.3 + step / 20, "probe_max_abs_diff": 0.0}
    return Step(attempt, step, step, {**defaults, **metrics})


def good_records() -> Records:
    return [
        Started(0, 0, [11, 12]),
        *(make_step(0, step) for step in range(1, 11)),
        Started(1, 9, [13, 14]),
        *(make_step(1, step) for step in range(10, TOTAL + 1)),
    ]


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A run's directory with commits at 3, 6, 9 and 12."""
    run = RunDirectory(tmp_path)
    for step in range(3, TOTAL + 1, 3):
        path = run.step(step) / "actor" / "model.pt"
        path.parent.mkdir(parents=True)
        path.write_bytes(bytes([step]) * 100)
        manifest = Manifest(
            kind=SaveKind.CHECKPOINT,
            step=step,
            attempt=0,
            incarnation="0123456789abcdef",
            run_uid="local",
            created_at=datetime.now(UTC),
            participants=(Participant("model", 0),),
            files=(FileEntry("actor/model.pt", 100, file_digest(path)),),
        )
        write_manifest(run, manifest)
    return tmp_path


def broken(records: Records, directory: Path, kill: Kill | None = KILL) -> list[str]:
    return [promise.text for promise in check(records, directory, TOTAL, kill) if not promise.kept]


def test_a_run_as_it_should_be_keeps_every_promise(directory: Path) -> None:
    assert broken(good_records(), directory) == []


def test_a_save_that_the_next_attempt_committed_counts_as_kept(directory: Path) -> None:
    assert broken(good_records(), directory, Kill(step=10, committed=6)) == []


def _earlier_resume(records: Records) -> Records:
    """The second attempt went back to step 6 although 9 was committed."""
    redone = [make_step(1, step) for step in range(7, 10)]
    return [*records[:11], Started(1, 6, [13, 14]), *redone, *records[12:]]


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (_earlier_resume, "no step is lost"),
        (lambda records: [*records[:11], Started(1, 0, [1]), *records[12:]], "no step is lost"),
        (lambda records: [r for r in records if r.step != 11], "no step is lost"),
        (lambda records: records[:11], "no step is lost"),
        (lambda records: records[:-1], "ends at its last step"),
        (lambda records: [*records[:12], make_step(1, 10, loss=1.0), *records[13:]], "same loss"),
        (
            lambda records: [
                *records[:5],
                make_step(0, 5, probe_max_abs_diff=2 * PROBE_TOLERANCE),
                *records[6:],
            ],
            "log-probabilities",
        ),
        (
            lambda records: [
                make_step(r.attempt, r.step, reward=0.5) if isinstance(r, Step) else r
                for r in records
            ],
            "reward rises",
        ),
    ],
)
def test_a_history_that_breaks_a_promise_is_told(
    change: Callable[[Records], Records], text: str, directory: Path
) -> None:
    assert any(text in promise for promise in broken(change(good_records()), directory))


def test_a_run_in_which_nothing_was_killed_proves_nothing(directory: Path) -> None:
    assert any("no step is lost" in text for text in broken(good_records(), directory, None))


def test_a_flipped_byte_in_an_old_checkpoint_is_found(directory: Path) -> None:
    path = RunDirectory(directory).step(3) / "actor" / "model.pt"
    path.write_bytes(b"x" + path.read_bytes()[1:])
    assert broken(good_records(), directory) == [
        "every committed checkpoint verifies, file by file and digest by digest"
    ]


def test_a_last_step_that_is_not_committed_is_told(directory: Path) -> None:
    RunDirectory(directory).manifest(SaveKind.CHECKPOINT, TOTAL).unlink()
    assert broken(good_records(), directory) == [
        "the run ends at its last step, and that is committed"
    ]
