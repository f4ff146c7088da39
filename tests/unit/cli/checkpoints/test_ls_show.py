from pathlib import Path

import pytest
from trainsync.storage import leases
from trainsync.storage.layout import RunDirectory
from trainsync.storage.saves import pointers

from tests.unit.cli.commands import call, document, findings, tree
from tests.unit.monitor.saves import CHECKPOINT, STATE_DICT


def test_ls_shows_every_committed_save_the_newest_last_and_which_is_the_latest(
    run: RunDirectory,
) -> None:
    saves = document("ls", run.root)["saves"]
    assert [(s["step"], s["kind"], s["pointedAt"], s["files"]) for s in saves] == [
        (10, "checkpoint", False, 2),
        (20, "checkpoint", False, 2),
        (20, "state_dict", True, 2),
        (30, "checkpoint", True, 2),
    ]
    assert {s["kept"] for s in saves} == {None}
    assert {s["problem"] for s in saves} == {None}


def test_ls_says_what_prune_would_keep(run: RunDirectory) -> None:
    saves = document("ls", run.root, "--keep", 1)["saves"]
    assert [(s["step"], s["kept"]) for s in saves if s["kind"] == "checkpoint"] == [
        (10, False), (20, True), (30, True),
    ]  # fmt: skip
    assert "would go" in call("ls", run.root, "--keep", 1).stdout


def test_ls_and_show_name_the_readers_of_a_step(run: RunDirectory) -> None:
    with leases.reading(run, CHECKPOINT, 10, "evaluator"):
        save = document("ls", run.root)["saves"][0]
        assert len(save["leases"]) == 1
        assert save["leases"][0].startswith("evaluator")
        assert "leased" in call("ls", run.root).stdout
        assert "evaluator" in call("show", run.root, 10).stdout
    assert document("ls", run.root)["saves"][0]["leases"] == []


def test_ls_compares_sizes_and_not_bytes(run: RunDirectory) -> None:
    file = run.step(20) / "actor/checkpoint_rank_0.pt"
    file.write_bytes(b"!" + file.read_bytes()[1:])
    assert call("ls", run.root).exit_code == 0
    file.write_bytes(b"short")
    assert findings("ls", run.root, code=1) == [
        ("damage", "size", "global_step_20/actor/checkpoint_rank_0.pt")
    ]


def test_a_missing_file_and_a_torn_manifest_are_damage(run: RunDirectory) -> None:
    (run.step(10) / "actor/checkpoint_rank_1.pt").unlink()
    run.manifest(STATE_DICT, 20).write_bytes(b"{")
    result = call("ls", run.root)
    assert result.exit_code == 1
    assert "checkpoint_rank_1.pt: is missing" in result.stdout
    assert "MANIFEST.state_dict.json" in result.stdout


def test_a_pointer_to_nothing_is_said(run: RunDirectory) -> None:
    pointers.move_pointer(run, CHECKPOINT, 99)
    result = call("ls", run.root)
    assert result.exit_code == 1
    assert "latest_checkpointed_iteration.txt: names step 99" in result.stdout


def test_show_tells_all_that_the_manifest_says(run: RunDirectory) -> None:
    found = document("show", run.root, 20)
    assert [save["kind"] for save in found["saves"]] == ["checkpoint", "state_dict"]
    save = found["saves"][0]
    assert (save["attempt"], save["incarnation"], save["runUid"]) == (0, "aaaaaaaa0", "local")
    assert save["participants"] == [
        {"component": "model", "rank": 0},
        {"component": "model", "rank": 1},
    ]
    assert [entry["path"] for entry in save["fileList"]] == [
        "actor/checkpoint_rank_0.pt",
        "actor/checkpoint_rank_1.pt",
    ]
    assert sum(entry["bytes"] for entry in save["fileList"]) == save["bytes"]
    assert save["seconds"] == 0.0
    text = call("show", run.root, 20, "--kind", "checkpoint").stdout
    for entry in save["fileList"]:
        assert entry["path"] in text
        assert entry["digest"].partition(":")[2] in text
    assert "model 0-1" in text
    assert "state_dict" not in text


def test_show_of_a_damaged_save_says_so(run: RunDirectory) -> None:
    run.manifest(CHECKPOINT, 30).write_bytes(b"[]")
    found = findings("show", run.root, 30, code=1)
    assert ("damage", "manifest", "global_step_30/MANIFEST.checkpoint.json") in found
    assert ("damage", "pointer_dangling", "latest_checkpointed_iteration.txt") in found
    assert call("show", run.root, 30).exit_code == 1


def test_a_step_or_kind_that_is_not_committed_is_wrong_usage(run: RunDirectory) -> None:
    for arguments in (("show", run.root, 5), ("show", run.root, 10, "--kind", "state_dict")):
        result = call(*arguments)
        assert result.exit_code == 2
        assert "is not committed in" in result.stderr
        assert result.stdout == ""


def test_an_empty_directory_is_a_run_that_has_not_begun(tmp_path: Path) -> None:
    result = call("ls", tmp_path)
    assert result.exit_code == 0
    assert "nothing is committed" in result.stdout


@pytest.mark.parametrize("command", [("ls",), ("verify",), ("repair",), ("prune", "--keep", "1")])
def test_a_path_that_is_no_run_directory_is_wrong_usage(
    tmp_path: Path, run: RunDirectory, command: tuple[str, ...]
) -> None:
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "file").touch()
    result = call(*command, tmp_path / "other")
    assert result.exit_code == 2
    assert "is not the directory of a run" in result.stderr
    result = call(*command, run.step(10))
    assert result.exit_code == 2
    assert f"give {run.root}" in result.stderr.replace("\n", "")
    assert call(*command, tmp_path / "none").exit_code == 2


def test_looking_changes_nothing(run: RunDirectory) -> None:
    before = tree(run.root)
    for command in (("ls",), ("verify",), ("show",)):
        call(*command, run.root, *((10,) if command == ("show",) else ()))
    assert tree(run.root) == before


def test_a_volume_that_vanishes_is_one_sentence(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    def vanished(self: RunDirectory) -> list[int]:
        raise OSError(116, "Stale file handle", str(self.root))

    monkeypatch.setattr(RunDirectory, "steps", vanished)
    for command in (("ls",), ("verify",), ("repair",), ("prune", "--keep", "1")):
        result = call(*command, run.root)
        assert result.exit_code == 3
        assert result.stderr.replace("\n", "") == f"{run.root}: Stale file handle"
        assert result.stdout == ""


def test_show_latest_is_the_step_that_the_pointer_names(run: RunDirectory) -> None:
    assert document("show", run.root, "latest")["step"] == 30
    assert document("show", run.root, "latest", "--kind", "state_dict")["step"] == 20
    assert "checkpoint of step 30" in call("show", run.root, "latest").stdout


def test_show_takes_the_latest_step_by_default_and_a_step_as_verify_does(
    run: RunDirectory,
) -> None:
    assert document("show", run.root) == document("show", run.root, "latest")
    assert document("show", run.root, "--step", 20) == document("show", run.root, 20)
    assert document("show", run.root, 20, "--step", 20)["step"] == 20
    result = call("show", run.root, 20, "--step", 30)
    assert result.exit_code == 2
    assert "give one of them" in result.stderr


def test_show_prints_each_digest_on_one_line_at_80_columns(run: RunDirectory) -> None:
    files = document("show", run.root, 20, "--kind", "checkpoint")["saves"][0]["fileList"]
    lines = call("show", run.root, 20, "--kind", "checkpoint").stdout.splitlines()
    for file in files:
        digest = file["digest"].partition(":")[2]
        (line,) = [line for line in lines if digest in line]
        assert line.startswith(digest)
        assert line.endswith(f"  {file['path']}")


def test_ls_says_that_it_compared_sizes(run: RunDirectory) -> None:
    result = call("ls", run.root)
    assert "judged by the sizes of their files; `verify` reads their bytes" in result.stderr


def test_show_says_what_a_step_may_be(run: RunDirectory) -> None:
    result = call("show", run.root, "newest")
    assert result.exit_code == 2
    assert "expected a number from 0 to" in result.stderr
    assert "or latest" in result.stderr


def test_show_latest_of_a_run_that_committed_nothing_is_refused(run: RunDirectory) -> None:
    for kind in (CHECKPOINT, STATE_DICT):
        run.pointer(kind).unlink(missing_ok=True)
    result = call("show", run.root, "latest")
    assert result.exit_code == 2
    assert "no latest step" in result.stderr
