"""`subdirectory`: verl's absolute paths, our relative ones, and what leaves the step."""

from pathlib import Path

import pytest
from trainsync.engines.paths import subdirectory
from trainsync.storage.errors import UnsafePathError

RUN = Path("/volume/run")


@pytest.mark.parametrize(
    ("local_path", "expected"),
    [
        ("actor", "actor"),
        ("critic/fsdp", "critic/fsdp"),
        ("/volume/run/global_step_7/actor", "actor"),
        (Path("/volume/run/global_step_7/a/b"), "a/b"),
    ],
)
def test_a_path_becomes_a_folder_inside_the_step(local_path: str | Path, expected: str) -> None:
    assert subdirectory(local_path, RUN, 7) == expected


@pytest.mark.parametrize(
    "local_path", ["/volume/run/global_step_8/actor", "/volume/run/actor", "/elsewhere"]
)
def test_an_absolute_path_elsewhere_is_refused(local_path: str) -> None:
    with pytest.raises(ValueError, match="is not inside /volume/run/global_step_7"):
        subdirectory(local_path, RUN, 7)


@pytest.mark.parametrize(
    "local_path", ["..", "../x", "a/../../b", "/volume/run/global_step_7/../x", "."]
)
def test_a_path_that_leaves_the_step_is_refused(local_path: str) -> None:
    with pytest.raises((UnsafePathError, ValueError)):
        subdirectory(local_path, RUN, 7)
