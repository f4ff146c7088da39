"""`subdirectory`: verl's absolute paths, our relative ones, and what leaves the step."""

from pathlib import Path

import pytest
from trainsync.engines.checkpoints.paths import inside_run, step_and_folder, subdirectory
from trainsync.storage.errors import UnsafePathError

RUN = Path("/volume/run")


@pytest.mark.parametrize(
    ("local_path", "expected"),
    [
        ("actor", "actor"),
        ("/volume/run/global_step_7/actor", "actor"),
        (Path("/volume/run/global_step_7/a/b"), "a/b"),
    ],
)
def test_a_path_becomes_a_folder_inside_the_step(local_path: str | Path, expected: str) -> None:
    assert subdirectory(local_path, lambda: RUN, 7) == expected


@pytest.mark.parametrize(
    "local_path", ["/volume/run/global_step_8/actor", "/volume/run/actor", "/elsewhere"]
)
def test_an_absolute_path_elsewhere_is_refused(local_path: str) -> None:
    with pytest.raises(ValueError, match="expected a folder in /volume/run/global_step_7"):
        subdirectory(local_path, lambda: RUN, 7)


def test_a_relative_path_begins_in_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run = tmp_path / "e2"
    assert subdirectory("e2/global_step_7/actor", lambda: run, 7) == "actor"
    assert subdirectory("./e2/global_step_7/critic/fsdp", lambda: run, 7) == "critic/fsdp"


@pytest.mark.parametrize(
    "local_path",
    ["e2/global_step_3/actor", "e2/actor", "e2/global_step_7", "global_step_7/actor", "a/b"],
)
def test_a_relative_path_elsewhere_is_refused_and_both_places_are_named(
    local_path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run = tmp_path / "e2"
    with pytest.raises(ValueError, match="expected a folder in") as refused:
        subdirectory(local_path, lambda: run, 7)
    assert str(tmp_path / local_path) in str(refused.value)
    assert str(run / "global_step_7") in str(refused.value)


@pytest.mark.parametrize(
    "local_path", ["..", "../x", "a/../../b", "/volume/run/global_step_7/../x", "."]
)
def test_a_path_that_leaves_the_step_is_refused(local_path: str) -> None:
    with pytest.raises((UnsafePathError, ValueError)):
        subdirectory(local_path, lambda: RUN, 7)


@pytest.mark.parametrize(
    ("local_path", "expected"),
    [
        ("/volume/run/global_step_7/actor", (7, "actor")),
        ("/volume/run/global_step_0/a/b", (0, "a/b")),
    ],
)
def test_a_place_of_the_run_is_a_step_and_a_folder(
    local_path: str, expected: tuple[int, str]
) -> None:
    assert step_and_folder(local_path, RUN) == expected


@pytest.mark.parametrize(
    "local_path",
    [
        "/elsewhere/global_step_7/actor",
        "/volume/run",
        "/volume/run/global_step_7",
        "/volume/run/global_step_x/actor",
        "/volume/run/global_step_7/../../x",
        "actor",
    ],
)
def test_any_other_place_is_refused(local_path: str) -> None:
    with pytest.raises((UnsafePathError, ValueError)):
        step_and_folder(local_path, RUN)


def test_a_run_is_recognised_behind_a_link_and_from_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (tmp_path / "link").symlink_to(run)
    monkeypatch.chdir(tmp_path)
    for path in ("run/global_step_1/actor", tmp_path / "link/global_step_1/actor"):
        assert step_and_folder(path, run) == (1, "actor")
    assert inside_run("elsewhere", run) is None


URL = "s3://bucket/runs/a"


@pytest.mark.parametrize("before", ["", "/tmp/x/", "/home/me/", "relative/"])
@pytest.mark.parametrize("url", [URL, "s3:/bucket/runs/a", "s3:///bucket/runs/a/"])
def test_a_run_in_a_store_is_recognised_by_its_url_in_any_path_that_verl_makes_of_it(
    before: str, url: str
) -> None:
    path = f"{before}{url}/global_step_7/actor"
    assert step_and_folder(path, URL) == (7, "actor")
    assert subdirectory(Path(path), lambda: URL, 7) == "actor"


@pytest.mark.parametrize(
    "path",
    [
        "s3://bucket/runs/ab/global_step_7/actor",
        "s3://other/runs/a/global_step_7/actor",
        "gs://bucket/runs/a/global_step_7/actor",
        "/bucket/runs/a/global_step_7/actor",
        "s3://bucket/runs/a/actor",
        "s3://bucket/runs/a/global_step_7",
        "s3://bucket/runs/a/global_step_7/../../x",
        "actor",
    ],
)
def test_another_store_is_none_of_the_run(path: str) -> None:
    with pytest.raises((UnsafePathError, ValueError)):
        step_and_folder(path, URL)


def test_a_folder_of_another_step_of_a_store_is_refused_and_both_are_named() -> None:
    path = f"{URL}/global_step_8/actor"
    with pytest.raises(ValueError, match="expected a folder in") as refused:
        subdirectory(path, lambda: URL, 7)
    assert f"'{path}'; expected" in str(refused.value)
    assert f"{URL}/global_step_7" in str(refused.value)
