from datetime import UTC, datetime
from typing import Any

import pytest
from trainsync.api.protocol import SaveKind
from trainsync.monitor.page import snapshot, timeline_svg
from trainsync.monitor.page.snapshot import Identity, Sources
from trainsync.storage.saves.claims import Claim

from tests.unit.monitor.page.pages import NOW, before, page, saves

IDENTITY = Identity("run", "training", "u", before(600))


def sources(**changed: Any) -> Sources:
    nothing: dict[str, Any] = {
        "status": {},
        "view": None,
        "committed": [],
        "witnessed": [],
        "claims": [],
        "news": [],
        "problem": None,
    }
    return Sources(**nothing | changed)


def test_a_commit_that_was_seen_and_is_on_the_volume_is_one() -> None:
    on_volume, seen = saves(5)[2:], saves(5)
    made = snapshot.build(IDENTITY, sources(committed=on_volume, witnessed=seen), NOW)
    assert [save.step for save in made.saves] == [1, 2, 3, 4, 5]


def test_checkpoint_and_state_dict_of_a_step_are_two() -> None:
    both = [*saves(1), *saves(1, SaveKind.STATE_DICT)]
    assert len(snapshot.build(IDENTITY, sources(committed=both), NOW).saves) == 2


def test_of_thousands_all_are_drawn_and_the_newest_listed_for_programs() -> None:
    made = snapshot.build(IDENTITY, sources(committed=saves(5000)), NOW)
    assert (len(made.saves), made.saves_left_out) == (5000, 0)
    listed = snapshot.listed(made)
    assert (listed.saves[0].step, listed.saves_left_out) == (3001, 3000)
    assert "steps 1 to" in timeline_svg.timeline(made)
    assert snapshot.listed(page()) == page()


def test_claims_tell_when_an_attempt_began_and_not_by_which_secret() -> None:
    claim = Claim(
        run_uid="u", attempt=2, cluster="main", incarnation="aaaaaaaa2", created_at=before(5)
    )
    made = snapshot.build(IDENTITY, sources(claims=[claim]), NOW)
    assert [(a.attempt, a.cluster, a.time) for a in made.attempts] == [(2, "main", before(5))]
    assert "aaaaaaaa2" not in made.model_dump_json()


@pytest.mark.parametrize("status", [{}, {"conditions": None}, {"conditions": [{"type": "New"}]}])
def test_a_status_without_what_this_version_knows_is_shown(status: dict[str, Any]) -> None:
    made = snapshot.build(IDENTITY, sources(status=status), NOW)
    assert (made.phase, made.attempt, made.conditions) == ("Pending", 0, [])


def test_the_operators_part_comes_from_the_status() -> None:
    status = {
        "phase": "Complete",
        "attempt": 3,
        "restarts": 2,
        "infrastructureRestarts": 1,
        "startTime": "2026-01-01T11:00:00Z",
        "completionTime": "2026-01-01T11:30:00Z",
    }
    made = snapshot.build(IDENTITY, sources(status=status), NOW)
    assert (made.phase, made.attempt, made.restarts) == ("Complete", 3, 2)
    assert made.infrastructure_restarts == 1
    assert made.completion_time == datetime(2026, 1, 1, 11, 30, tzinfo=UTC)


def test_only_the_time_may_differ_between_pages_that_say_the_same() -> None:
    assert snapshot.same(page(), page(time=before(-5)))
    assert not snapshot.same(page(), page(attempt=2))
