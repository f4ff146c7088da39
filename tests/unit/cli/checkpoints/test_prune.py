import shutil

import pytest
import typer
from trainsync.cli.checkpoints.prune import command, plan, question
from trainsync.storage import leases
from trainsync.storage.layout import RunDirectory
from trainsync.storage.saves import pointers
from trainsync.storage.saves.resume_target import ResumeTarget, write_resume_target

from tests.unit.cli.commands import call, document, findings, tree
from tests.unit.cli.conftest import make_old
from tests.unit.monitor import saves
from tests.unit.monitor.saves import CHECKPOINT, FIRST, STATE_DICT


def test_old_steps_go_and_what_pointers_name_stays(idle: RunDirectory) -> None:
    found = document("prune", idle.root, "--keep", 1, "--yes")
    assert [(r["step"], r["kinds"]) for r in found["removed"]] == [(10, ["checkpoint"])]
    assert found["removed"][0]["bytes"] > 2 * 2000
    assert found["kept"] == [20, 30]  # 20 has the newest state dict
    assert idle.steps() == [20, 30]
    assert list(idle.trash.iterdir()) == []
    assert findings("verify", idle.root, code=0) == []
    assert document("prune", idle.root, "--keep", 1, "--force")["removed"] == []


def test_what_a_newer_attempt_trained_again_is_newer(idle: RunDirectory) -> None:
    path = idle.manifest(CHECKPOINT, 10)
    path.write_text(path.read_text().replace('"attempt": 0', '"attempt": 1'))
    (idle.step(20) / "MANIFEST.state_dict.json").unlink()
    idle.pointer(STATE_DICT).unlink()
    make_old(idle.root)
    found = document("prune", idle.root, "--keep", 1, "--dry-run")
    assert [removal["step"] for removal in found["removed"]] == [20]
    assert found["kept"] == [10, 30]  # 30 has the pointer


def test_a_dry_run_changes_nothing_and_says_the_same(idle: RunDirectory) -> None:
    before = tree(idle.root)
    planned = document("prune", idle.root, "--keep", 1, "--dry-run")
    assert "1 step to remove" in call("prune", idle.root, "--keep", 1, "--dry-run").stdout
    assert tree(idle.root) == before
    done = document("prune", idle.root, "--keep", 1, "--yes")
    assert planned.pop("dryRun") is True
    assert done.pop("dryRun") is False
    assert planned == done


def test_nothing_is_removed_where_a_run_may_be_at_work(run: RunDirectory) -> None:
    before = tree(run.root)
    result = call("prune", run.root, "--keep", 1, "--yes")
    assert result.exit_code == 3
    assert "a run seems to be at work" in result.stderr.replace("\n", " ")
    assert tree(run.root) == before
    assert call("prune", run.root, "--keep", 1, "--yes", "--force").exit_code == 0
    assert run.steps() == [20, 30]


def test_what_is_read_or_being_saved_stays(idle: RunDirectory) -> None:
    saves.write(idle.root, FIRST, 10, 0)  # step 10 is saved again
    (saves.directory(idle.root, FIRST, 10).committed).unlink()
    make_old(idle.root)
    assert document("prune", idle.root, "--keep", 1, "--dry-run")["removed"] == []
    shutil.rmtree(saves.directory(idle.root, FIRST, 10).path)
    make_old(idle.root)
    with leases.reading(idle, CHECKPOINT, 10, "evaluator"):
        assert document("prune", idle.root, "--keep", 1, "--dry-run")["removed"] == []
    assert len(document("prune", idle.root, "--keep", 1, "--dry-run")["removed"]) == 1


def test_what_an_attempt_resumed_from_stays_until_it_has_committed_something_newer(
    idle: RunDirectory,
) -> None:
    def resume(attempt: int) -> None:
        target = ResumeTarget(attempt=attempt, step=10, manifest_digest="sha256:")
        write_resume_target(idle, target)

    resume(1)
    assert document("prune", idle.root, "--keep", 1, "--dry-run")["removed"] == []
    resume(0)  # the attempt that saved 20 and 30
    assert len(document("prune", idle.root, "--keep", 1, "--dry-run")["removed"]) == 1
    idle.resume_target.write_text("{")
    result = call("prune", idle.root, "--keep", 1, "--dry-run")
    assert result.exit_code == 3
    assert "RESUME.json" in result.stderr.replace("\n", "")
    assert findings("verify", idle.root, code=1) == [
        ("damage", "resume_target", ".trainsync/RESUME.json")
    ]


def test_the_newest_whole_save_stays_whatever_the_rule_says(idle: RunDirectory) -> None:
    (idle.step(30) / "actor/checkpoint_rank_0.pt").unlink()
    (idle.step(20) / "actor/checkpoint_rank_0.pt").unlink()
    make_old(idle.root)
    assert document("prune", idle.root, "--keep", 1, "--yes")["removed"] == []


def test_a_reader_that_comes_at_the_last_moment_keeps_its_step(
    idle: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_readers(_run: RunDirectory) -> dict[object, object]:
        return {}

    monkeypatch.setattr(plan, "leases_in_force", no_readers)
    with leases.reading(idle, CHECKPOINT, 10, "evaluator"):
        found = document("prune", idle.root, "--keep", 1, "--yes", "--force", code=3)
    assert found["removed"] == []
    assert found["held"] == [10]
    assert 10 in idle.steps()


def test_a_pointer_that_moves_at_the_last_moment_keeps_its_step(idle: RunDirectory) -> None:
    idle.pointer(CHECKPOINT).unlink()
    pointers.move_pointer(idle, CHECKPOINT, 10)
    assert plan.remove(idle, 10) is False
    assert 10 in idle.steps()


def test_it_asks_and_takes_no_for_an_answer(
    idle: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = call("prune", idle.root, "--keep", 1)
    assert result.exit_code == 3
    assert "give --yes" in result.stderr
    monkeypatch.setattr(question, "can_ask", lambda: True)
    monkeypatch.setattr("typer.confirm", lambda *_args, **_kwargs: False)
    assert call("prune", idle.root, "--keep", 1).exit_code == 3
    assert 10 in idle.steps()
    monkeypatch.setattr("typer.confirm", lambda *_args, **_kwargs: True)
    assert call("prune", idle.root, "--keep", 1).exit_code == 0
    assert 10 not in idle.steps()


def test_an_interrupt_leaves_every_step_whole_or_gone(
    idle: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(_run: RunDirectory) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(command, "empty_trash", interrupted)
    result = call("prune", idle.root, "--keep", 1, "--yes")
    assert result.exit_code == 130
    assert "steps removed: 10" in result.stderr
    assert "global_step_10" not in str(list(idle.root.iterdir()))
    codes = {code for _, code, _ in findings("verify", idle.root, code=0)}
    assert codes == {"trash"}


def test_an_interrupt_at_the_question_removes_nothing(
    idle: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    def abort(*_args: object, **_kwargs: object) -> bool:
        raise typer.Abort

    monkeypatch.setattr(question, "can_ask", lambda: True)
    monkeypatch.setattr("typer.confirm", abort)
    before = tree(idle.root)
    assert call("prune", idle.root, "--keep", 1).exit_code == 130
    assert tree(idle.root) == before


def test_keeping_nothing_is_wrong_usage(idle: RunDirectory) -> None:
    assert call("prune", idle.root, "--keep", 0).exit_code == 2
    assert call("prune", idle.root).exit_code == 2
