import os
from collections.abc import Callable
from pathlib import Path

import pytest
from trainsync.api.protocol import SaveState
from trainsync.monitor.core.core import CoreSettings, MonitorCore
from trainsync.monitor.ledger.saves import SaveOwner
from trainsync.storage import leases
from trainsync.storage.inspect import digests, repair
from trainsync.storage.layout import RunDirectory
from trainsync.storage.saves import manifest, pointers, retention, superseding

from tests.unit.cli.commands import call, document, findings, tree
from tests.unit.cli.conftest import make_old
from tests.unit.monitor import saves
from tests.unit.monitor.saves import CHECKPOINT, FIRST, SECOND, STATE_DICT


def test_a_healthy_directory_is_left_as_it_is(run: RunDirectory) -> None:
    before = tree(run.root)
    found = document("repair", run.root)
    assert (found["actions"], found["refused"]) == ([], [])
    assert call("repair", run.root).stdout == "nothing to mend\n"
    assert tree(run.root) == before


def test_repair_says_when_it_judged_by_size_alone(run: RunDirectory) -> None:
    file = run.step(30) / "actor/checkpoint_rank_0.pt"
    file.write_bytes(b"!" + file.read_bytes()[1:])
    result = call("repair", run.root)
    assert result.stdout == "nothing to mend\n"
    assert "judged by the sizes of their files; --digest reads their bytes" in result.stderr
    assert "--digest" not in call("repair", run.root, "--digest").stderr


@pytest.mark.parametrize("text", ["99\n", "x\n", "", "20\n", None])
def test_a_pointer_is_moved_to_the_newest_valid_save(run: RunDirectory, text: str | None) -> None:
    run.pointer(CHECKPOINT).unlink()
    if text is not None:
        run.pointer(CHECKPOINT).write_text(text)
    found = document("repair", run.root)
    assert [(a["act"], a["path"]) for a in found["actions"]] == [
        ("move_pointer", "latest_checkpointed_iteration.txt")
    ]
    assert "moved to step 30" in found["actions"][0]["message"]
    assert pointers.read_pointer(run, CHECKPOINT) == 30
    assert document("repair", run.root)["actions"] == []


def test_a_pointer_to_a_damaged_save_goes_back_and_with_digest_a_flipped_bit_counts(
    run: RunDirectory,
) -> None:
    file = run.step(30) / "actor/checkpoint_rank_0.pt"
    file.write_bytes(b"!" + file.read_bytes()[1:])
    assert document("repair", run.root)["actions"] == []
    found = document("repair", run.root, "--digest")
    assert [a["act"] for a in found["actions"]] == ["set_aside", "move_pointer"]
    assert "checkpoint_rank_0.pt: has digest" in found["actions"][0]["message"]
    assert pointers.read_pointer(run, CHECKPOINT) == 20
    assert not run.manifest(CHECKPOINT, 30).exists()
    aside = ("leftover", "set_aside", "global_step_30/MANIFEST.checkpoint.json.damaged")
    assert aside in findings("verify", run.root, code=0)
    assert document("repair", run.root, "--digest")["actions"] == []
    os.truncate(run.step(20) / "actor/checkpoint_rank_0.pt", 1)
    file.unlink()
    document("repair", run.root)
    assert pointers.read_pointer(run, CHECKPOINT) == 10


def test_with_nothing_valid_left_the_pointer_stays_and_that_is_said(run: RunDirectory) -> None:
    run.pointer(STATE_DICT).write_text("99\n")
    for step in (10, 20, 30):
        (run.step(step) / "actor/checkpoint_rank_0.pt").unlink()
    found = document("repair", run.root, code=3)
    assert [action["path"] for action in found["actions"]] == ["latest_state_dict_iteration.txt"]
    assert len(found["refused"]) == 1
    assert "no valid manifest of a checkpoint is left" in found["refused"][0]
    assert run.pointer(CHECKPOINT).read_text() == "30\n"
    result = call("repair", run.root)
    assert result.exit_code == 3
    assert "no valid manifest of a checkpoint is left" in result.stderr.replace("\n", " ")


def test_old_temporaries_ended_leases_and_the_trash_go(run: RunDirectory) -> None:
    names = (
        ".latest.1a.tmp",
        "global_step_20/actor/.x.pt.2b.tmp",
        ".staging/0-aaaaaaaa0/checkpoint/.x.3c.tmp",
        ".trainsync/claims/.x.4d.tmp",
    )
    for name in names:
        (run.root / name).touch()
    (run.root / "folder").mkdir()
    (run.root / "folder" / "file").write_bytes(b"12345")
    retention.discard(run, run.root / "folder")
    run.leases.mkdir(parents=True, exist_ok=True)
    (run.leases / "checkpoint-10-old-12345678.json").write_text("{}")
    make_old(run.root)
    young = run.root / ".latest.5e.tmp"
    young.touch()
    before = tree(run.root)
    planned = document("repair", run.root, "--dry-run")
    assert tree(run.root) == before
    done = document("repair", run.root)
    assert planned["actions"] == done["actions"]
    assert sorted((a["act"], a["path"]) for a in done["actions"]) == sorted(
        [
            *(("remove_temporary", name) for name in names),
            ("remove_leases", ".trainsync/leases"),
            ("empty_trash", ".trainsync/trash"),
        ]
    )
    assert "5 bytes" in str(done["actions"])
    assert findings("verify", run.root, code=0) == [("leftover", "temporary", ".latest.5e.tmp")]


def test_a_step_that_a_crash_kept_from_its_place_is_put_there(idle: RunDirectory) -> None:
    place = superseding.aside(idle, saves.directory(idle.root, FIRST, 20, STATE_DICT))
    place.parent.mkdir()
    idle.step(20).rename(place)
    place.with_name(place.name + ".old").mkdir()
    make_old(idle.root)
    found = findings("verify", idle.root, code=1)
    assert ("damage", "aside", place.relative_to(idle.root).as_posix()) in found
    assert [severity for severity, code, _ in found if code == "aside"] == ["damage", "leftover"]
    before = tree(idle.root)
    assert [a["act"] for a in document("repair", idle.root, "--dry-run")["actions"]] == [
        "put_in_place"
    ]
    assert tree(idle.root) == before
    done = document("repair", idle.root)["actions"]
    assert [action["act"] for action in done] == ["put_in_place"]
    assert pointers.read_pointer(idle, STATE_DICT) == 20
    assert {code for _, code, _ in findings("verify", idle.root, code=0)} == {"aside"}


def test_what_is_put_aside_is_left_to_a_run_at_work(run: RunDirectory) -> None:
    place = superseding.aside(run, saves.directory(run.root, FIRST, 20, STATE_DICT))
    place.parent.mkdir()
    run.step(20).rename(place)
    place.with_name(place.name + ".old").mkdir()
    result = call("repair", run.root)
    assert "left to it" in result.stderr.replace("\n", " ")
    assert result.exit_code == 0
    assert pointers.read_pointer(run, STATE_DICT) == 20
    assert place.exists()


def test_a_lease_in_force_and_what_is_not_ours_stay(run: RunDirectory) -> None:
    (run.root / "notes.tmp").touch()
    (run.step(10) / "actor/extra.pt").touch()
    make_old(run.root)
    with leases.reading(run, CHECKPOINT, 10, "evaluator") as lease:
        assert document("repair", run.root)["actions"] == []
        assert lease.path.exists()
    assert (run.root / "notes.tmp").exists()
    assert (run.step(10) / "actor/extra.pt").exists()


def test_a_pointer_that_moves_meanwhile_is_left_alone(run: RunDirectory) -> None:
    run.pointer(CHECKPOINT).write_text("99\n")
    plan = repair.plan_pointers(run, with_digest=False, threads=1)
    run.pointer(CHECKPOINT).write_text("20\n")
    assert [action.do() for action in plan.actions] == [False]
    assert run.pointer(CHECKPOINT).read_text() == "20\n"


def test_a_pointer_that_moves_while_repair_writes_is_left_alone(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    run.pointer(CHECKPOINT).write_text("99\n")
    (action,) = repair.plan_pointers(run, with_digest=False, threads=1).actions
    fsync = os.fsync

    def monitor_commits_meanwhile(fd: int) -> None:
        run.pointer(CHECKPOINT).write_text("20\n")
        fsync(fd)

    monkeypatch.setattr(os, "fsync", monitor_commits_meanwhile)
    assert not action.do()
    assert run.pointer(CHECKPOINT).read_text() == "20\n"
    assert not list(run.root.glob(".*.tmp"))


def test_a_save_that_differs_in_memory_alone_is_not_set_aside(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    first: set[Path] = set()
    digest = digests.file_digest

    def differs_once(path: Path, on_block: Callable[[int], None]) -> str:
        found = digest(path, on_block)
        if path in first:
            return found
        first.add(path)
        return f"xxh3-128:{'0' * 32}"

    monkeypatch.setattr(digests, "file_digest", differs_once)
    before = tree(run.root)
    assert document("repair", run.root, "--digest")["actions"] == []
    assert first, "files were read"
    assert tree(run.root) == before
    assert "differed when it was read first, and not the second time" in caplog.text


def test_a_temporary_that_became_a_link_is_not_followed(
    run: RunDirectory, tmp_path_factory: pytest.TempPathFactory
) -> None:
    outside = tmp_path_factory.mktemp("outside")
    (outside / ".x.1a.tmp").touch()
    (run.root / ".y.1a.tmp").symlink_to(outside / ".x.1a.tmp")
    os.utime(run.root / ".y.1a.tmp", (1, 1), follow_symlinks=False)
    call("repair", run.root)
    assert (outside / ".x.1a.tmp").exists()


def test_a_run_that_never_committed_has_nothing_to_mend(run: RunDirectory) -> None:
    for kind in (CHECKPOINT, STATE_DICT):
        run.pointer(kind).unlink()
    for step in run.steps():
        retention.remove_step(run, step)
    retention.empty_trash(run)
    assert document("repair", run.root)["actions"] == []


def test_a_save_with_changed_bytes_stays_in_its_place_when_no_other_is_left(
    run: RunDirectory,
) -> None:
    for step in (10, 20, 30):
        file = run.step(step) / "actor/checkpoint_rank_0.pt"
        file.write_bytes(b"!" + file.read_bytes()[1:])
    found = document("repair", run.root, "--digest", code=3)
    assert [a["act"] for a in found["actions"]] == []
    assert run.manifest(CHECKPOINT, 30).exists()


def test_a_save_that_was_replaced_meanwhile_is_not_set_aside(run: RunDirectory) -> None:
    file = run.step(30) / "actor/checkpoint_rank_0.pt"
    file.write_bytes(b"!" + file.read_bytes()[1:])
    plan = repair.plan_pointers(run, with_digest=True, threads=1)
    there = run.manifest(CHECKPOINT, 30)
    there.write_bytes(there.read_bytes() + b"\n")
    assert [action.act.value for action in plan.actions] == ["set_aside", "move_pointer"]
    assert not plan.actions[0].do()
    assert there.exists()


def test_attempts_resume_from_the_save_before_one_that_was_set_aside_and_save_its_step_again(
    tmp_path: Path,
) -> None:
    run = RunDirectory(tmp_path)

    def core(owner: SaveOwner) -> MonitorCore:
        found = MonitorCore(run, CoreSettings(), clock=saves.Clock())
        found.claim(owner, "main", None)
        return found

    def save(of: MonitorCore, owner: SaveOwner, step: int) -> None:
        of.saves.register(owner, saves.request(step))
        saves.write_all(tmp_path, owner, step)
        of.tick()
        assert of.saves.save_status(owner, CHECKPOINT, step).state is SaveState.COMMITTED

    first = core(FIRST)
    for step in (1, 2):
        save(first, FIRST, step)
    file = run.step(2) / "actor/checkpoint_rank_0.pt"
    file.write_bytes(b"!" + file.read_bytes()[1:])
    document("repair", tmp_path, "--digest")
    document("verify", tmp_path, code=0)

    second = core(SECOND)
    resumed = second.resume(SECOND)
    assert resumed is not None
    assert resumed.step == pointers.read_pointer(run, CHECKPOINT) == 1
    save(second, SECOND, 2)
    assert pointers.read_pointer(run, CHECKPOINT) == 2
    manifest.check_manifest(
        run, manifest.read_manifest(run, CHECKPOINT, 2).manifest, with_digest=True
    )
    assert not run.set_aside(CHECKPOINT, 2).exists()


def test_a_monitor_at_work_follows_a_repair(tmp_path: Path) -> None:
    run, clock = RunDirectory(tmp_path), saves.Clock()
    core = MonitorCore(run, CoreSettings(), clock=clock)
    core.claim(FIRST, "main", None)
    for step in (1, 2):
        core.saves.register(FIRST, saves.request(step))
        saves.write_all(tmp_path, FIRST, step)
        core.tick()
    file = run.step(2) / "actor/checkpoint_rank_0.pt"
    file.write_bytes(b"!" + file.read_bytes()[1:])
    document("repair", tmp_path, "--digest")
    clock.go(31)
    core.tick()
    assert pointers.read_pointer(run, CHECKPOINT) == 1
    resumed = core.resume(FIRST)
    assert resumed is not None
    assert resumed.step == 1
    assert core.view().checkpoint.retained == [1]
