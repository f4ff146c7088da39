"""Where shards are kept: names are read back, and a place that others may write is refused."""

import dataclasses
import os
from pathlib import Path

import pytest
from trainsync.checkpoint.memory.place import KeptName, MemoryPlace

from tests.unit.checkpoint.memory.keeping import place_in

DIGEST = "0123456789abcdef0123456789abcdef"
WHOLE = f"12-3-0123456789abcdef-extra_state-7-{DIGEST}"


def test_a_name_says_what_is_kept_and_of_which_attempt() -> None:
    kept = KeptName.parse(WHOLE)
    assert kept == KeptName(WHOLE, 12, 3, "0123456789abcdef", f"xxh3-128:{DIGEST}", "extra_state-7")
    writing = KeptName.parse("12-3-0123456789abcdef-extra_state-7-writing-0123456789abcdef")
    assert writing is not None
    assert writing.digest is None
    assert not writing.is_spare
    spare = KeptName.parse("12-3-0123456789abcdef-extra_state-7-spare-0123456789abcdef")
    assert spare is not None
    assert spare.digest is None
    assert spare.is_spare
    assert {kept.part, writing.part, spare.part} == {"extra_state-7"}


@pytest.mark.parametrize(
    "name", ["lock", "alive", "", f"{WHOLE}0", f"../{WHOLE}", f"{WHOLE}\n", WHOLE.replace("-", "_")]
)
def test_other_names_are_none_of_ours(name: str) -> None:
    assert KeptName.parse(name) is None


def test_runs_are_kept_apart_by_uid_and_by_directory(tmp_path: Path) -> None:
    places = {
        MemoryPlace.of_run(tmp_path, 1, uid, tmp_path / run).directory
        for uid in ("a", "b")
        for run in ("x", "y")
    }
    assert len(places) == 4
    assert {place.parent for place in places} == {tmp_path / f"trainsync-{os.geteuid()}"}


def test_runs_in_buckets_are_kept_apart_by_their_url_wherever_a_process_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def places() -> list[MemoryPlace]:
        urls = ("s3://bucket/a", "s3://bucket/b")
        return [MemoryPlace.of_run(Path("/shm"), 2, "uid", url, copies=1) for url in urls]

    first, second = places()
    assert first.directory != second.directory
    assert first.shared == "s3://bucket/a"
    monkeypatch.chdir(tmp_path)
    assert places() == [first, second]


def test_a_place_is_for_its_user_alone(tmp_path: Path) -> None:
    (tmp_path / "shm").mkdir()
    place = place_in(tmp_path)
    place.make()
    place.make()
    for directory in (place.directory, place.directory.parent):
        assert directory.stat().st_mode & 0o077 == 0
    assert list(place.files()) == []


def test_without_a_place_nothing_is_kept(tmp_path: Path) -> None:
    assert list(place_in(tmp_path).files()) == []


@pytest.mark.parametrize("level", ["directory", "parent"])
def test_a_place_that_others_may_use_is_refused(tmp_path: Path, level: str) -> None:
    (tmp_path / "shm").mkdir()
    place = place_in(tmp_path)
    place.make()
    open_to_all = place.directory if level == "directory" else place.directory.parent
    open_to_all.chmod(0o770)
    with pytest.raises(PermissionError, match="no rights for others"):
        place.make()
    with pytest.raises(PermissionError, match="no rights for others"):
        list(place.files())


def test_a_symbolic_link_in_its_place_is_refused(tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir(mode=0o700)
    place = place_in(tmp_path)
    place.directory.parent.mkdir(parents=True, mode=0o700)
    place.directory.symlink_to(elsewhere)
    with pytest.raises(NotADirectoryError):
        place.make()
    with pytest.raises(NotADirectoryError):
        list(place.files())


def test_another_owner_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "shm").mkdir()
    place = place_in(tmp_path)
    place.make()
    own = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: own + 1)
    with pytest.raises(PermissionError, match=f"expected owner {own + 1}"):
        list(place.files())


def test_a_memory_that_is_not_mounted_cannot_be_used(tmp_path: Path) -> None:
    place = dataclasses.replace(place_in(tmp_path), directory=tmp_path / "nowhere" / "a" / "b")
    with pytest.raises(FileNotFoundError):
        place.make()
