import errno
import os
from pathlib import Path

import pytest
from trainsync.monitor.core.core import CoreSettings, MonitorCore
from trainsync.storage import parallel
from trainsync.storage.inspect import digests
from trainsync.storage.inspect import saves as inspecting
from trainsync.storage.layout import RunDirectory
from trainsync.storage.saves import pointers, receipts, retention

from tests.unit.cli.commands import call, document, findings
from tests.unit.monitor import saves
from tests.unit.monitor.saves import CHECKPOINT, FIRST, SECOND, STATE_DICT

SHARD = "global_step_20/actor/checkpoint_rank_1.pt"


def test_a_healthy_run_has_nothing_to_say(run: RunDirectory) -> None:
    found = document("verify", run.root)
    assert found["findings"] == []
    assert len(found["saves"]) == 4
    assert found["read"]["bytes"] == sum(save["bytes"] for save in found["saves"])
    result = call("verify", run.root)
    assert "0 damaged, 0 leftovers" in result.stderr


def test_a_flipped_bit_is_named(run: RunDirectory) -> None:
    path = run.root / SHARD
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    assert findings("verify", run.root, code=1) == [("damage", "digest", SHARD)]
    assert findings("verify", run.root, "--step", 20, code=1) == [("damage", "digest", SHARD)]
    assert findings("verify", run.root, "--step", 10, code=0) == []
    result = call("verify", run.root)
    assert result.exit_code == 1
    assert f"{SHARD}: has digest xxh3-128:" in result.stdout
    problems = {(s["step"], s["kind"]): s["problem"] for s in document(
        "verify", run.root, code=1)["saves"]}  # fmt: skip
    assert problems.pop((20, "checkpoint"))
    assert set(problems.values()) == {None}


def test_of_damage_in_the_step_that_the_pointer_names_verify_says_what_comes_next(
    run: RunDirectory,
) -> None:
    path = run.step(30) / "actor/checkpoint_rank_0.pt"
    data = path.read_bytes()
    path.write_bytes(b"!" + data[1:])
    for arguments in ((), ("--step", 30), ("--step", "latest")):
        text = call("verify", run.root, *arguments).stderr
        command = f"trainsync checkpoints repair --digest {run.root}"
        assert f"`{command}` moves the pointer to the newest checkpoint that is whole" in text
        assert "the run's next start fails on step 30, and the start after it resumes" in text
    path.write_bytes(data[:-1])
    text = call("verify", run.root).stderr
    assert f"`trainsync checkpoints repair {run.root}` moves the pointer" in text
    assert "the run's next start resumes from that one" in text
    path.write_bytes(data)
    assert "repair" not in call("verify", run.root).stderr


def test_of_damage_in_another_step_verify_names_no_remedy(run: RunDirectory) -> None:
    path = run.step(10) / "actor/checkpoint_rank_0.pt"
    path.write_bytes(b"!" + path.read_bytes()[1:])
    result = call("verify", run.root)
    assert result.exit_code == 1
    assert "repair" not in result.stderr


def test_a_step_that_is_no_number_is_wrong_usage(run: RunDirectory) -> None:
    result = call("verify", run.root, "--step", "newest")
    assert result.exit_code == 2
    assert "expected a number from 0 to" in result.stderr


def test_every_bad_file_is_named_and_not_the_first_alone(run: RunDirectory) -> None:
    (run.step(10) / "actor/checkpoint_rank_0.pt").unlink()
    os.truncate(run.step(10) / "actor/checkpoint_rank_1.pt", 7)
    assert findings("verify", run.root, code=1) == [
        ("damage", "missing", "global_step_10/actor/checkpoint_rank_0.pt"),
        ("damage", "size", "global_step_10/actor/checkpoint_rank_1.pt"),
    ]


def test_links_are_refused_in_a_save_and_not_followed_beside_it(
    tmp_path: Path, run: RunDirectory
) -> None:
    outside = tmp_path / "outside"
    (run.root / SHARD).rename(outside)
    (run.root / SHARD).symlink_to(outside)
    (run.step(10) / "link").symlink_to(tmp_path)
    (run.root / "global_step_99").symlink_to(run.step(10))
    assert findings("verify", run.root, code=1) == [
        ("damage", "not_a_file", SHARD),
        ("damage", "not_a_directory", "global_step_99"),
        ("leftover", "unlisted", "global_step_10/link"),
    ]


def test_what_a_terminal_would_obey_is_written_out(run: RunDirectory) -> None:
    (run.step(10) / "actor/[red]\x1b[31m.pt").touch()
    shown = call("verify", run.root).stdout
    assert "[red]\\x1b[31m.pt" in shown and "\x1b[31m" not in shown


@pytest.mark.parametrize("name", [".staging", ".trainsync/claims", ".trainsync"])
def test_our_own_folders_are_not_looked_into_through_a_link(
    tmp_path: Path, run: RunDirectory, name: str
) -> None:
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "x.json").write_text("{}")
    (run.root / name).rename(tmp_path / "moved")
    (run.root / name).symlink_to(tmp_path / "outside")
    found = findings("verify", run.root, code=1)
    assert {(severity, code) for severity, code, _ in found} == {("damage", "not_a_directory")}


def test_files_of_no_save_are_leftovers(run: RunDirectory) -> None:
    owner = run.staging / "0-aaaaaaaa0"
    run.quarantine_requests.mkdir()
    for path in (
        run.root / ".latest.1a.tmp",
        run.step(20) / "actor/.x.pt.2b.tmp",
        owner / "checkpoint/.x.3c.tmp",
        run.claims / ".x.4d.tmp",
        run.claims.parent / ".RESUME.json.7a.tmp",
        run.quarantine_requests / ".x.6f.tmp",
        run.step(20) / "actor/extra.pt",
        run.staging / "what",
    ):
        path.touch()
    (run.root / "notes.txt").touch()  # a person's own
    (run.root / "global_step_7/actor").mkdir(parents=True)
    (run.root / "global_step_7/actor/x.pt").touch()
    retention.discard(run, run.root / "notes.txt")
    found = findings("verify", run.root, code=0)
    assert {code for severity, code, _ in found if severity == "damage"} == set()
    assert [(code, path) for _, code, path in found if code != "trash"] == [
        ("temporary", ".latest.1a.tmp"),
        ("temporary", ".staging/0-aaaaaaaa0/checkpoint/.x.3c.tmp"),
        ("staging", ".staging/what"),
        ("temporary", ".trainsync/.RESUME.json.7a.tmp"),
        ("temporary", ".trainsync/claims/.x.4d.tmp"),
        ("temporary", ".trainsync/doubts/.x.6f.tmp"),
        ("temporary", "global_step_20/actor/.x.pt.2b.tmp"),
        ("unlisted", "global_step_20/actor/extra.pt"),
        ("half_promoted", "global_step_7"),
    ]
    assert [path.rpartition("/")[0] for _, code, path in found if code == "trash"] == [
        ".trainsync/trash"
    ]


def test_what_is_in_staging_is_told(run: RunDirectory) -> None:
    saves.write(run.root, FIRST, 40, 0)  # one of two ranks, and no registration
    (directory := saves.directory(run.root, FIRST, 10)).files.mkdir()
    assert findings("verify", run.root, code=0) == [
        ("leftover", "staging", ".staging/0-aaaaaaaa0/checkpoint/global_step_10"),
        ("leftover", "staging", ".staging/0-aaaaaaaa0/checkpoint/global_step_40"),
    ]
    text = call("verify", run.root).stdout
    assert "staged files of a save that was committed" in text
    assert "an unfinished save (1 receipts)" in text
    directory.files.rmdir()
    saves.write(run.root, SECOND, 50, 0)
    assert findings("verify", run.root, code=0) == [
        ("leftover", "staging", ".staging/0-aaaaaaaa0"),
        ("leftover", "staging", ".staging/1-bbbbbbbb1/checkpoint/global_step_50"),
    ]


def test_a_record_in_staging_that_is_damaged_is_told(run: RunDirectory) -> None:
    saves.directory(run.root, FIRST, 10).registration.write_bytes(b"{")
    found = findings("verify", run.root, code=0)
    assert found == [("leftover", "staging", ".staging/0-aaaaaaaa0/checkpoint/global_step_10")]


def test_a_manifest_that_is_not_the_one_committed_is_damage(run: RunDirectory) -> None:
    path = run.manifest(CHECKPOINT, 10)
    path.write_text(path.read_text().replace("2026", "2025"))
    assert findings("verify", run.root, code=1) == [
        ("damage", "manifest_changed", "global_step_10/MANIFEST.checkpoint.json")
    ]
    path.unlink()
    found = findings("verify", run.root, code=1)
    assert ("damage", "manifest_missing", "global_step_10/MANIFEST.checkpoint.json") in found


def test_a_step_that_retention_took_is_not_missed(run: RunDirectory) -> None:
    retention.remove_step(run, 10)
    retention.empty_trash(run)
    assert findings("verify", run.root, code=0) == []


def test_pointers_are_checked(run: RunDirectory) -> None:
    name = "latest_checkpointed_iteration.txt"
    for text, severity, code in (
        ("99\n", "damage", "pointer_dangling"),
        ("x\n", "damage", "pointer"),
        ("10\n", "leftover", "pointer_behind"),
    ):
        (run.root / name).write_text(text)
        assert findings("verify", run.root, code=severity == "damage") == [(severity, code, name)]
    (run.root / name).unlink()
    assert findings("verify", run.root, code=0) == [("leftover", "pointer_behind", name)]
    pointers.move_pointer(run, CHECKPOINT, 30)
    os.truncate(run.step(30) / "actor/checkpoint_rank_0.pt", 1)
    assert ("damage", "pointer_dangling", name) in findings("verify", run.root, code=1)


def test_a_damaged_claim_is_damage_because_no_monitor_starts_with_it(run: RunDirectory) -> None:
    (run.claims / "local-0-main.json").write_bytes(b"{")
    (run.claims / "local-0-main.json~").write_bytes(b"{")  # no monitor reads that
    assert findings("verify", run.root, code=1) == [
        ("damage", "claim", ".trainsync/claims/local-0-main.json")
    ]


def test_a_lease_that_ended_is_a_leftover(run: RunDirectory) -> None:
    run.leases.mkdir(parents=True, exist_ok=True)
    lease = run.leases / "checkpoint-10-old-12345678.json"
    lease.write_text("{}")
    os.utime(lease, (1, 1))
    assert findings("verify", run.root, code=0) == [
        ("leftover", "lease", ".trainsync/leases/checkpoint-10-old-12345678.json")
    ]


def test_a_file_that_two_kinds_share_is_read_once(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    core = MonitorCore(run, CoreSettings(), clock=saves.Clock())
    core.claim(FIRST, "main", None)
    core.saves.register(FIRST, saves.request(5, STATE_DICT))
    saves.write_all(tmp_path, FIRST, 5, STATE_DICT)
    core.tick()
    core.saves.register(FIRST, saves.request(5, CHECKPOINT, reuse=True))
    saves.write_all(tmp_path, FIRST, 5, CHECKPOINT)
    core.tick()
    found = document("verify", tmp_path)
    assert [save["files"] for save in found["saves"]] == [4, 2]
    assert found["read"]["bytes"] == found["saves"][0]["bytes"]


def test_a_save_that_retention_takes_meanwhile_is_no_damage(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_digests = inspecting.check_digests

    def removed_first(*args: object, **kwargs: object) -> object:
        retention.remove_step(run, 10)
        retention.empty_trash(run)
        return check_digests(*args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(inspecting, "check_digests", removed_first)
    found = document("verify", run.root)
    assert [save["step"] for save in found["saves"]] == [20, 20, 30]


def test_a_file_with_a_bad_sector_is_damage_and_a_lost_volume_is_not(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    digest = digests.file_digest
    number = errno.EIO

    def broken(path: Path, on_block: object) -> str:
        if path == run.root / SHARD:
            raise OSError(number, os.strerror(number), str(path))
        return digest(path, on_block)  # type: ignore[arg-type]

    monkeypatch.setattr(digests, "file_digest", broken)
    assert findings("verify", run.root, code=1) == [("damage", "unreadable", SHARD)]
    for number in (errno.ESTALE, errno.EACCES, errno.ENOTCONN):
        result = call("verify", run.root, "--json")
        assert result.exit_code == 3
        assert result.stdout == ""
        assert os.strerror(number) in result.stderr


def test_an_interrupt_ends_the_threads_and_is_said(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_args: object, **_kwargs: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(parallel, "_wait", interrupted)
    result = call("verify", run.root)
    assert result.exit_code == 130
    assert result.stderr == "interrupted\n"


def test_an_ended_save_keeps_its_outcome_and_that_is_no_leftover(run: RunDirectory) -> None:
    assert receipts.read_outcome(saves.directory(run.root, FIRST, 10)) is not None
    assert findings("verify", run.root, code=0) == []


def test_a_step_that_is_not_committed_cannot_be_verified(run: RunDirectory) -> None:
    result = call("verify", run.root, "--step", 5)
    assert result.exit_code == 2
    assert "step 5 is not committed" in result.stderr
