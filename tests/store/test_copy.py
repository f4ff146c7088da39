"""Steps go from a volume to a bucket, to another one, and back; a trainer resumes from them."""

from pathlib import Path

import pytest
from trainsync.monitor.core.core import CoreSettings, MonitorCore
from trainsync.storage.layout import RunDirectory
from trainsync.storage.saves import manifest, pointers

from tests.store.conftest import Place
from tests.unit.cli.commands import call, document, findings
from tests.unit.monitor.saves import CHECKPOINT, SECOND, STATE_DICT, Clock


def files_of(run: RunDirectory, step: int) -> dict[str, bytes]:
    base = run.step(step)
    return {
        path.relative_to(base).as_posix(): path.read_bytes()
        for path in base.rglob("*")
        if path.is_file()
    }


def test_a_step_comes_back_byte_for_byte_and_an_attempt_resumes_from_it(
    place: Place, run: RunDirectory, tmp_path: Path
) -> None:
    found = document("cp", run.root, place.url())
    assert [(s["kind"], s["files"], s["wasThere"]) for s in found["saves"]] == [
        ("checkpoint", 2, False)
    ]
    assert document("cp", run.root, place.url(), "--step", 20)["step"] == 20
    saves = document("ls", place.url())["saves"]
    assert [(s["step"], s["kind"], s["pointedAt"]) for s in saves] == [
        (20, "checkpoint", False),
        (20, "state_dict", True),
        (30, "checkpoint", True),
    ]
    assert findings("verify", place.url(), code=0) == []

    back = RunDirectory(tmp_path / "new" / "back")
    assert document("cp", place.url(), back.root)["step"] == 30
    document("cp", place.url(), back.root, "--step", 20, "--kind", "state_dict")
    assert files_of(back, 30) == files_of(run, 30)
    assert pointers.read_pointer(back, CHECKPOINT) == 30
    assert pointers.read_pointer(back, STATE_DICT) == 20
    assert findings("verify", back.root, code=0) == []
    assert not back.staging.exists()

    core = MonitorCore(back, CoreSettings(), clock=Clock())
    core.claim(SECOND, "main", None)
    resumed = core.resume(SECOND)
    assert resumed is not None
    assert resumed.step == 30


def test_a_bucket_is_copied_to_another_one(place: Place, run: RunDirectory) -> None:
    document("cp", run.root, place.url())
    document("cp", place.url(), place.url("runs/b"), "--step", "latest")
    assert findings("verify", place.url("runs/b"), code=0) == []
    first, second = (document("show", place.url(p), 30) for p in ("runs/a", "runs/b"))
    assert first["saves"][0]["fileList"] == second["saves"][0]["fileList"]


def test_a_directory_is_copied_to_another_one(run: RunDirectory, tmp_path: Path) -> None:
    document("cp", run.root, tmp_path / "b", "--step", 10)
    assert files_of(RunDirectory(tmp_path / "b"), 10) == files_of(run, 10)


def test_what_is_there_stays_as_it_is(place: Place, run: RunDirectory) -> None:
    document("cp", run.root, place.url())
    before = place.objects()
    assert document("cp", run.root, place.url())["saves"][0]["wasThere"] is True
    assert place.objects() == before
    assert "is in" in call("cp", run.root, place.url()).stdout


def test_an_older_step_does_not_move_the_pointer_back(place: Place, run: RunDirectory) -> None:
    document("cp", run.root, place.url())
    document("cp", run.root, place.url(), "--step", 10)
    assert (place.files / "runs/a/latest_checkpointed_iteration.txt").read_text() == "30\n"


def test_another_save_of_a_step_is_refused(place: Place, run: RunDirectory, tmp_path: Path) -> None:
    document("cp", run.root, place.url())
    path = run.manifest(CHECKPOINT, 30)
    path.write_text(path.read_text().replace('"attempt": 0', '"attempt": 7'))
    result = call("cp", run.root, place.url())
    assert result.exit_code == 3
    assert "checkpoint 30 in s3://" in result.stderr
    assert "is another save, of attempt 0 of run local" in result.stderr
    document("cp", place.url(), tmp_path / "back")
    result = call("cp", run.root, tmp_path / "back")
    assert result.exit_code == 3
    assert "is another save" in result.stderr


def test_a_damaged_file_is_not_copied(place: Place, run: RunDirectory) -> None:
    file = run.step(30) / "actor/checkpoint_rank_1.pt"
    file.write_bytes(b"!" + file.read_bytes()[1:])
    result = call("cp", run.root, place.url())
    assert result.exit_code == 1
    assert "was not copied" in result.stderr
    assert "checkpoint_rank_1.pt has digest" in result.stderr
    assert document("ls", place.url())["saves"] == []


def test_a_damaged_object_is_found_and_not_copied(
    place: Place, run: RunDirectory, tmp_path: Path
) -> None:
    document("cp", run.root, place.url())
    (path,) = place.files.rglob("checkpoint_rank_0.pt")
    path.write_bytes(b"!" + path.read_bytes()[1:])
    name = "global_step_30/actor/checkpoint_rank_0.pt"
    assert findings("ls", place.url(), code=0) == []
    assert findings("verify", place.url(), code=1) == [
        ("damage", "digest", name),
        ("damage", "pointer_dangling", "latest_checkpointed_iteration.txt"),
    ]
    result = call("cp", place.url(), tmp_path / "back")
    assert result.exit_code == 1
    assert not (tmp_path / "back/global_step_30/MANIFEST.checkpoint.json").exists()
    path.write_bytes(path.read_bytes()[1:])
    assert findings("ls", place.url(), code=1)[0] == ("damage", "size", name)
    path.unlink()
    assert findings("ls", place.url(), code=1)[0] == ("damage", "missing", name)


def test_a_run_at_work_is_left_alone(place: Place, run: RunDirectory) -> None:
    document("cp", run.root, place.url(), "--step", 10)
    run.pointer(CHECKPOINT).write_text("30\n")
    result = call("cp", place.url(), run.root, "--step", 10)
    assert result.exit_code == 3
    assert "a run seems to be at work" in result.stderr
    assert call("cp", place.url(), run.root, "--step", 10, "--force").exit_code == 0


def test_old_steps_are_pruned(place: Place, run: RunDirectory) -> None:
    for step in (10, 20, 30):
        document("cp", run.root, place.url(), "--step", step)
    plan = document("prune", place.url(), "--keep", 1, "--dry-run")
    assert [r["step"] for r in plan["removed"]] == [10]
    assert [s["kept"] for s in document("ls", place.url(), "--keep", 1)["saves"]] == [
        False, True, True, True,
    ]  # fmt: skip
    result = call("prune", place.url(), "--keep", 1)
    assert result.exit_code == 3
    assert "give --yes" in result.stderr
    found = document("prune", place.url(), "--keep", 1, "--yes")
    assert (found["kept"], found["held"], found["orphans"]) == ([20, 30], [], [])
    assert not [key for key in place.objects() if "global_step_10" in key]
    assert findings("verify", place.url(), code=0) == []


@pytest.mark.parametrize(
    "prefix", ["", "a b", "ü/日本", "x%20y+z&=1", "q!*'()~$:;,@", 'a"<>[]{}^`|']
)
def test_odd_characters_in_the_url_and_in_paths_are_taken_as_they_are(
    place: Place, run: RunDirectory, tmp_path: Path, prefix: str
) -> None:
    file = run.step(30) / "actor/checkpoint_rank_1.pt"
    odd = "odd ü%41 #?&+.pt"
    file.rename(file.with_name(odd))
    path = run.manifest(CHECKPOINT, 30)
    path.write_text(path.read_text().replace(file.name, odd))
    url = place.url(prefix).rstrip("/")
    document("cp", run.root, url)
    assert findings("verify", url, code=0) == []
    document("cp", url, tmp_path / "back")
    back = RunDirectory(tmp_path / "back")
    assert files_of(back, 30) == files_of(run, 30)
    written = manifest.read_manifest(back, CHECKPOINT, 30)
    assert written == manifest.read_manifest(run, CHECKPOINT, 30)
    if prefix:
        assert (place.files / prefix / "latest_checkpointed_iteration.txt").exists()


@pytest.mark.parametrize(
    ("fixture", "missing"),
    [("container", "az://no-such-container/x"), ("gcs_bucket", "gs://no-such-bucket/x")],
    ids=["azure", "gcs"],
)
def test_a_store_that_is_not_s3_holds_steps_too(
    fixture: str,
    missing: str,
    run: RunDirectory,
    tmp_path: Path,
    request: pytest.FixtureRequest,
) -> None:
    url = f"{request.getfixturevalue(fixture)}/a b/ü"
    for step in (10, 20, 30):
        document("cp", run.root, url, "--step", step)
    assert document("cp", run.root, url)["saves"][0]["wasThere"] is True
    assert findings("verify", url, code=0) == []
    assert [r["step"] for r in document("prune", url, "--keep", 1, "--yes")["removed"]] == [10]
    document("cp", url, tmp_path / "back")
    assert files_of(RunDirectory(tmp_path / "back"), 30) == files_of(run, 30)
    result = call("ls", missing)
    assert result.exit_code == 3
    assert "there is no such bucket" in result.stderr


def test_a_mirror_of_a_bucket_is_read_as_a_directory(
    place: Place, run: RunDirectory, tmp_path: Path
) -> None:
    document("cp", run.root, place.url())
    mirror = f"file://{place.files}/runs/a"
    assert findings("verify", mirror, code=0) == []
    document("cp", mirror, tmp_path / "back")
    assert files_of(RunDirectory(tmp_path / "back"), 30) == files_of(run, 30)
    result = call("cp", run.root, mirror, "--step", 10)
    assert result.exit_code == 3
    assert "a directory is given without file://" in result.stderr


def test_an_endpoint_that_is_given_wins_over_the_environment(
    place: Place, run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "http://127.0.0.1:1")
    document("cp", run.root, place.url(), "--endpoint", place.direct)
    assert document("ls", place.url(), "--endpoint", place.direct)["saves"][0]["step"] == 30
