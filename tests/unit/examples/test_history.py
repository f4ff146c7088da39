"""The history that the demo checks must read back as written."""

from pathlib import Path

from tiny_grpo.history import History, Started, Step, read_history

RECORDS = [
    Started(attempt=0, step=0, trainer_pids=[11, 12]),
    Step(attempt=0, step=1, version=1, metrics={"loss": 0.1 + 0.2, "reward": 1 / 3}),
]


def test_records_read_back_equal_bit_for_bit(tmp_path: Path) -> None:
    history = History(tmp_path / "history")
    for record in RECORDS:
        history.add(record)
    assert read_history(tmp_path / "history") == RECORDS


def test_a_line_that_is_still_being_written_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "history"
    for record in RECORDS:
        History(path).add(record)
    path.write_text(path.read_text() + '{"kind": "Step", "attempt": 0, "st')
    assert read_history(path) == RECORDS


def test_a_run_that_has_not_started_has_no_records(tmp_path: Path) -> None:
    assert read_history(tmp_path / "none") == []
