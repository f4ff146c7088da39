"""Names of incarnations, and which succeeds which."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from trainsync.storage.layout import RunDirectory
from trainsync.storage.saves.incarnations import MOST_RESTARTS, generation, succeeds, successor
from trainsync.storage.saves.resume_target import resumed_from, write_resume_target

NAMES = st.from_regex(r"[a-z0-9]{8,32}", fullmatch=True)


@given(NAMES, st.integers(1, 5))
def test_each_successor_is_one_restart_later_and_a_name_that_every_release_reads(
    name: str, count: int
) -> None:
    began = generation(name)
    for number in range(began + 1, min(began + count, MOST_RESTARTS) + 1):
        newer = successor(name)
        assert re.fullmatch(r"[a-z0-9]{8,32}", newer)
        assert generation(newer) == number
        assert succeeds(newer, name)
        assert not succeeds(name, newer)
        name = newer


@given(NAMES)
def test_two_processes_never_choose_the_same_successor(name: str) -> None:
    if generation(name) < MOST_RESTARTS:
        assert successor(name) != successor(name)


def test_a_name_of_a_claim_is_no_successor() -> None:
    assert generation("0123456789abcdef") == 0
    assert not succeeds("fedcba9876543210r1x00000000", "0123456789abcdef")
    assert not succeeds("0123456789abcdefr3x00000000", "0123456789abcdefr1x00000000")


def test_an_attempt_is_not_restarted_for_ever() -> None:
    with pytest.raises(ValueError, match="99 times at most"):
        successor(f"0123456789abcdefr{MOST_RESTARTS}x00000000")


def test_a_resume_target_of_a_release_without_restarts_is_read_as_before_the_first(
    tmp_path: Path,
) -> None:
    run = RunDirectory(tmp_path)
    run.resume_target.parent.mkdir()
    record = {"attempt": 2, "step": 10, "manifestDigest": "sha256:0", "runUid": "u", "version": 1}
    run.resume_target.write_text(json.dumps(record))
    older = resumed_from(run, "u", 2)
    assert older is not None
    assert (older.step, older.age("u")) == (10, (True, 2, 0))
    assert resumed_from(run, "u", 2, restarts=1) is None
    name = successor("0123456789abcdef")
    write_resume_target(run, replace(older, incarnation=name))
    assert resumed_from(run, "u", 2) is None
    assert resumed_from(run, "u", 2, restarts=1) is not None
