"""The registry of failpoints: what is switched on, told and named."""

import re
from pathlib import Path

import pytest
from trainsync import failpoints
from trainsync.failpoints import POINTS, SAVE, SEND, failpoint

SOURCES = Path(failpoints.__file__).parent


def test_a_point_is_told_to_the_handlers_of_its_area_alone() -> None:
    told: list[str] = []
    failpoint("save.opened")  # off by default
    failpoints.enable(SAVE, told.append)
    with failpoints.enabled(SEND, told.append):
        failpoint("save.opened")
        failpoint("send.bucket")
        failpoint("receive.bucket")
    failpoint("send.bucket")
    assert told == ["opened", "bucket"]
    failpoints.disable_all()
    failpoint("save.opened")
    assert told == ["opened", "bucket"]


def test_what_a_handler_raises_is_raised_at_the_point() -> None:
    def fail(point: str) -> None:
        raise OSError(f"at {point}")

    with failpoints.enabled(SAVE, fail), pytest.raises(OSError, match="at renamed"):
        failpoint("save.renamed")
    failpoint("save.renamed")


def test_an_area_that_there_is_not_is_refused() -> None:
    with pytest.raises(ValueError, match="expected one of save, commit, send, receive"):
        failpoints.enable("weights", print)


def test_the_code_reaches_every_point_of_the_catalogue_and_no_other() -> None:
    named = {
        name
        for path in SOURCES.rglob("*.py")
        if path != Path(failpoints.__file__)
        for name in re.findall(r'failpoint\("([^"]+)"\)', path.read_text())
    }
    assert named == {f"{area}.{point}" for area, points in POINTS.items() for point in points}
