"""What a crash or a person left in a bucket is mended; what another process does meanwhile wins."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from trainsync.storage.inspect.repair import ActionKind
from trainsync.storage.layout import RunDirectory
from trainsync.storage.objects import removal, repair

from tests.store.conftest import Place
from tests.store.servers.fault_proxy import Fault
from tests.unit.cli.commands import call, document, findings

POINTER = "latest_checkpointed_iteration.txt"
MANIFEST = "manifests/checkpoint/global_step_30.json"


@pytest.fixture
def url(place: Place, run: RunDirectory) -> str:
    """A bucket with steps 10, 20 (with a state dict) and 30."""
    for step in (10, 20, 30):
        document("cp", run.root, place.url(), "--step", step)
    return place.url()


def root(place: Place) -> Path:
    return place.files / "runs/a"


def shard(place: Place, step: int) -> Path:
    folder = root(place) / f"objects/global_step_{step}"
    return min(folder.rglob("checkpoint_rank_0.pt"))


def put(place: Place, key: str, text: str) -> None:
    """Replace an object as a client does: a file that is written here has no e-tag of its own."""
    bucket = place.open()
    bucket.delete([key])
    bucket.create(key, text.encode())


def flip(path: Path) -> None:
    path.write_bytes(b"!" + path.read_bytes()[1:])


def acts(found: dict[str, object]) -> list[tuple[str, str]]:
    return [(a["act"], a["path"]) for a in found["actions"]]  # type: ignore[attr-defined]


def contents(place: Place) -> dict[str, bytes]:
    return {key: (place.files / key).read_bytes() for key in place.objects()}


def test_a_healthy_bucket_is_left_as_it_is(place: Place, url: str) -> None:
    before = contents(place)
    found = document("repair", url, "--digest")
    assert (found["directory"], found["actions"], found["refused"]) == (url, [], [])
    assert call("repair", url).stdout == "nothing to mend\n"
    assert contents(place) == before


@pytest.mark.parametrize("text", ["99\n", "x\n", "", "20\n", None])
def test_a_pointer_is_moved_to_the_newest_valid_save(
    place: Place, url: str, text: str | None
) -> None:
    pointer = root(place) / POINTER
    pointer.unlink()
    if text is not None:
        put(place, POINTER, text)
    before = contents(place)
    planned = document("repair", url, "--dry-run")
    assert contents(place) == before
    found = document("repair", url)
    assert found["actions"] == planned["actions"]
    assert acts(found) == [("move_pointer", POINTER)]
    assert "moved to step 30" in found["actions"][0]["message"]
    assert pointer.read_text() == "30\n"
    assert document("repair", url)["actions"] == []
    assert findings("verify", url, code=0) == []


def test_a_save_without_an_object_is_set_aside_and_can_be_copied_again(
    place: Place, url: str, run: RunDirectory
) -> None:
    gone = shard(place, 30)
    gone.unlink()
    manifest = (root(place) / MANIFEST).read_bytes()
    assert call("cp", run.root, url).exit_code == 1
    before = contents(place)
    planned = document("repair", url, "--dry-run")
    assert contents(place) == before
    found = document("repair", url)
    assert found["actions"] == planned["actions"]
    assert acts(found) == [("set_aside", MANIFEST), ("move_pointer", POINTER)]
    assert "checkpoint_rank_0.pt: is missing" in found["actions"][0]["message"]
    assert (root(place) / POINTER).read_text() == "20\n"
    aside = gone.parents[1] / "MANIFEST.checkpoint.json.damaged"
    assert aside.read_bytes() == manifest
    folder = aside.parent.relative_to(root(place)).as_posix()
    assert findings("verify", url, code=0) == [("leftover", "unlisted", folder)]
    assert document("cp", run.root, url)["saves"][0]["wasThere"] is False
    assert (root(place) / POINTER).read_text() == "30\n"
    assert document("repair", url)["actions"] == []
    assert findings("verify", url, code=0) == [("leftover", "unlisted", folder)]


def test_changed_bytes_count_with_digest_alone(place: Place, url: str) -> None:
    flip(shard(place, 30))
    flip(shard(place, 10))
    assert document("repair", url)["actions"] == []
    found = document("repair", url, "--digest")
    assert acts(found) == [("set_aside", MANIFEST), ("move_pointer", POINTER)]
    assert "has digest" in found["actions"][0]["message"]
    steps = [save["step"] for save in document("ls", url)["saves"]]
    assert steps == [10, 20, 20], "what is older than the newest whole save is not read"


def test_bytes_that_change_on_the_way_set_nothing_aside(place: Place, url: str) -> None:
    rule = place.proxy.break_next(Fault.CORRUPTED, "GET", r"global_step_30/.*rank_0\.pt$")
    assert document("repair", url, "--digest")["actions"] == []
    assert rule.left == 0


def test_with_nothing_valid_left_all_stays_and_that_is_said(place: Place, url: str) -> None:
    for step in (10, 20, 30):
        for path in (root(place) / f"objects/global_step_{step}").rglob("checkpoint_rank_0.pt"):
            path.unlink()
    before = contents(place)
    found = document("repair", url, code=3)
    assert [a for a in acts(found) if a[1] == POINTER] == []
    assert len(found["refused"]) == 1
    assert "no valid manifest of a checkpoint is left" in found["refused"][0]
    assert contents(place) == before


def test_a_manifest_that_is_not_understood_stays_and_is_not_pointed_to(
    place: Place, url: str
) -> None:
    manifest = root(place) / MANIFEST
    manifest.write_text(manifest.read_text().replace('"version": 1', '"version": 2'))
    assert acts(document("repair", url)) == [("move_pointer", POINTER)]
    assert '"version": 2' in manifest.read_text()
    assert (root(place) / POINTER).read_text() == "20\n"


def test_what_is_of_no_save_goes_when_it_is_old(
    place: Place, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    lonely = root(place) / "objects/global_step_40/0-aaaaaaaa-0123456789abcdef/actor/x.pt"
    lonely.parent.mkdir(parents=True)
    lonely.write_bytes(b"12345")
    probe = root(place) / "probe/0123456789abcdef"
    probe.parent.mkdir(exist_ok=True)
    probe.write_bytes(b"first")
    assert document("repair", url)["actions"] == []
    monkeypatch.setattr(removal, "ORPHAN_SECONDS", -60.0)
    before = contents(place)
    planned = document("repair", url, "--dry-run")
    assert contents(place) == before
    found = document("repair", url)
    assert planned["actions"] == found["actions"]
    assert acts(found) == [
        ("remove_orphans", "objects/global_step_40/0-aaaaaaaa-0123456789abcdef"),
        ("remove_temporary", "probe"),
    ]
    assert "1 object that no manifest names, 5 bytes" in found["actions"][0]["message"]
    assert not lonely.exists()
    assert not probe.exists()
    assert findings("verify", url, code=0) == []


def test_a_repair_that_was_cut_off_is_finished_by_the_next(place: Place, url: str) -> None:
    shard(place, 30).unlink()
    rule = place.proxy.break_next(
        Fault.REFUSED, "POST", r"delete", 1000, status=403, code="AccessDenied"
    )
    result = call("repair", url)
    assert result.exit_code == 3
    assert "access is denied" in result.stderr
    assert (root(place) / MANIFEST).read_bytes() == repair.SET_ASIDE
    rule.left = 0
    found = document("repair", url)
    assert acts(found) == [("set_aside", MANIFEST), ("move_pointer", POINTER)]
    assert "a repair that was cut off" in found["actions"][0]["message"]
    assert not (root(place) / MANIFEST).exists()
    assert {code for _, code, _ in findings("verify", url, code=0)} == {"unlisted"}


@pytest.mark.parametrize("fault", [Fault.LOST_REPLY, Fault.DONE_BUT_500])
@pytest.mark.parametrize("pattern", [r"global_step_30\.json$", r"iteration\.txt$", r"damaged$"])
def test_a_put_that_was_done_and_whose_reply_is_lost_counts(
    place: Place, url: str, fault: Fault, pattern: str
) -> None:
    shard(place, 30).unlink()
    rule = place.proxy.break_next(fault, "PUT", pattern)
    assert acts(document("repair", url)) == [("set_aside", MANIFEST), ("move_pointer", POINTER)]
    assert rule.left == 0
    assert (root(place) / POINTER).read_text() == "20\n"
    assert document("repair", url)["actions"] == []


def planned(place: Place) -> dict[ActionKind, Callable[[], bool]]:
    plan = repair.plan_saves(place.open(), with_digest=False, threads=2)
    return {action.act: action.do for action in plan.actions}


def test_what_another_process_did_meanwhile_stays(
    place: Place, url: str, run: RunDirectory, tmp_path: Path
) -> None:
    shutil.copytree(run.root, tmp_path / "other")
    other = RunDirectory(tmp_path / "other")
    path = other.root / "global_step_30/MANIFEST.checkpoint.json"
    path.write_text(path.read_text().replace('"attempt": 0', '"attempt": 7'))
    shard(place, 30).unlink()
    plan = planned(place)
    # The step is removed, and another save of it is copied, before the plan is carried out.
    (root(place) / MANIFEST).unlink()
    document("cp", other.root, url)
    before = contents(place)
    assert plan[ActionKind.SET_ASIDE]() is False
    assert plan[ActionKind.MOVE_POINTER]() is False
    assert contents(place) == before
    assert document("ls", url)["saves"][-1]["step"] == 30


def test_a_pointer_that_moved_meanwhile_stays(place: Place, url: str, run: RunDirectory) -> None:
    put(place, POINTER, "99\n")
    plan = planned(place)
    put(place, POINTER, "98\n")
    assert plan[ActionKind.MOVE_POINTER]() is False
    assert (root(place) / POINTER).read_text() == "98\n"


def test_a_step_that_was_pruned_meanwhile_is_not_pointed_to(place: Place, url: str) -> None:
    (root(place) / POINTER).write_text("99\n")
    plan = planned(place)
    (root(place) / MANIFEST).unlink()
    assert plan[ActionKind.MOVE_POINTER]() is False
    assert (root(place) / POINTER).read_text() == "99\n"


def test_a_store_without_conditional_puts_is_not_changed(place: Place, url: str) -> None:
    mirror = f"file://{root(place)}"
    assert call("repair", mirror).stdout == "nothing to mend\n"
    (root(place) / POINTER).write_text("99\n")
    before = contents(place)
    assert acts(document("repair", mirror, "--dry-run")) == [("move_pointer", POINTER)]
    result = call("repair", mirror)
    assert result.exit_code == 3
    assert "does not honour conditional puts" in result.stderr
    assert contents(place) == before


def test_wrong_usage_is_one_sentence(place: Place, url: str, run: RunDirectory) -> None:
    for arguments, expected in (
        ((run.root, "--region", "x"), "are for the URL of a store"),
        (("ftp://a/b",), "no store is opened by ftp://"),
    ):
        result = call("repair", *arguments)
        assert (result.exit_code, result.stdout) == (2, ""), result.stderr
        assert expected in result.stderr
