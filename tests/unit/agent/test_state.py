"""When a version is brought to a server, and when requests may go there."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from trainsync.agent.admission.judgement import Judgement, Verdict
from trainsync.agent.state import (
    FIRST_WAIT_SECONDS,
    LONGEST_WAIT_SECONDS,
    AgentPhase,
    AgentState,
    ReadinessLimits,
    ReportedWeights,
    UpdateOutcome,
)
from trainsync.agent.version import Version, on_volume
from trainsync.api.protocol import ASLEEP
from trainsync.engines.servers.tags import DISCARDED

_LIMITS = ReadinessLimits(max_staleness=1, serve_before_first=False, blind_seconds=60)
_BASE = ReportedWeights("default", paused=False)


def version(step: int, attempt: int = 0, byte: str = "a") -> Version:
    published = on_volume(step, f"global_step_{step}", "sha256:" + "0" * 64, 8, attempt)
    return Version("uid", attempt, "sha256:" + byte * 64, published)


def serving(tag: str, *versions: Version) -> AgentState:
    """The agent has heard of the versions, in order, and the server has ``tag``, proven."""
    state = AgentState().saw(ReportedWeights(tag, paused=False)).judged(judged(tag))
    for each in versions:
        state = state.found(each, 0)
    return state


def judged(tag: str, verdict: Verdict = Verdict.PROVEN) -> Judgement:
    return Judgement(tag, verdict, None if verdict is Verdict.PROVEN else "for a reason")


def loaded(state: AgentState, taken: Version, verdict: Verdict) -> AgentState:
    """A server took a version, and its weights were judged."""
    return state.entered(AgentPhase.UPDATING).updated(taken).judged(judged(taken.tag, verdict))


def test_a_server_that_was_never_seen_is_not_ready_and_gets_nothing() -> None:
    state = AgentState().found(version(7), 0)
    assert state.wanted(0) is None
    assert "does not answer" in (state.unready(_LIMITS, 0) or "")


def test_only_a_server_that_was_asked_and_is_away_has_versions_staged_ahead() -> None:
    state = AgentState().found(version(7), 0)
    assert state.ahead(0) is None, "it may have that version"
    away = state.server_failed("refused")
    assert away.ahead(0) == version(7)
    assert away.entered(AgentPhase.STAGING).ahead(0) is None
    assert away.saw(_BASE).ahead(0) is None
    failed = away.failed(version(7), UpdateOutcome.UNAVAILABLE, "gone", 0)
    assert failed.ahead(0) is None
    assert failed.ahead(120) == version(7)


def test_before_the_first_version_a_server_is_ready_only_when_that_is_asked_for() -> None:
    state = AgentState().saw(_BASE)
    early = replace(_LIMITS, serve_before_first=True)
    assert "no version is known" in (state.unready(early, 0) or "")
    state = state.looked(0)
    assert state.unready(_LIMITS, 0) == "no version is committed yet"
    assert state.unready(early, 0) is None
    assert state.found(version(1), 0).unready(early, 0) is not None


def test_a_server_gets_the_newest_version_unless_it_has_exactly_that() -> None:
    seventh = version(7)
    assert serving("default", seventh).wanted(0) == seventh
    assert serving("6-" + "a" * 16, seventh).wanted(0) == seventh
    assert serving("7", seventh).wanted(0) == seventh  # of which bytes, nobody knows
    assert serving("7-" + "b" * 16, seventh).wanted(0) == seventh
    assert serving(seventh.tag, seventh).wanted(0) is None
    paused = serving(seventh.tag, seventh).saw(ReportedWeights(seventh.tag, paused=True))
    assert paused.wanted(0) == seventh  # an agent may have died while it loaded another one


@pytest.mark.parametrize(("behind", "ready"), [(0, True), (1, True), (2, False)])
def test_staleness_counts_steps(behind: int, ready: bool) -> None:
    versions = [version(step) for step in range(5, 6 + behind)]
    state = serving(versions[0].tag, *versions)
    assert state.lag == behind
    assert (state.unready(_LIMITS, 0) is None) == ready


def test_weights_of_an_abandoned_attempt_are_not_ready_whatever_their_step() -> None:
    old, back = version(9), version(8, attempt=1, byte="b")
    assert serving(old.tag, old).unready(_LIMITS, 0) is None
    assert "the run is at" in (serving(old.tag, old, back).unready(_LIMITS, 0) or "")
    newer = version(10, attempt=1, byte="b")
    assert serving(old.tag, old, back, newer).unready(_LIMITS, 0) is not None


def test_a_step_whose_weights_were_replaced_is_not_ready() -> None:
    old, again = version(7), version(7, byte="b")
    state = serving(old.tag, old, again)
    assert state.unready(_LIMITS, 0) is not None
    assert state.wanted(0) == again


def test_a_version_that_an_attempt_resumed_from_stays_ready() -> None:
    old = version(9)
    again = version(9, attempt=1)
    state = serving(old.tag, old, again)
    assert state.unready(_LIMITS, 0) is None
    assert state.wanted(0) is None


def test_a_server_stays_ready_for_a_while_when_the_newest_version_is_not_known() -> None:
    state = serving(version(7).tag, version(7)).feed_failed("the volume is away")
    assert state.unready(_LIMITS, 60) is None
    assert "the volume is away" in (state.unready(_LIMITS, 61) or "")
    assert state.looked(61).unready(_LIMITS, 61) is None


def test_a_paused_or_loading_server_is_not_ready() -> None:
    state = serving(version(7).tag, version(7))
    assert state.saw(ReportedWeights(version(7).tag, paused=True)).unready(_LIMITS, 0) is not None
    assert state.entered(AgentPhase.UPDATING).unready(_LIMITS, 0) is not None
    assert state.entered(AgentPhase.FETCHING).unready(_LIMITS, 0) is None


def test_a_refused_version_is_tried_again_after_waits_that_grow_and_are_bounded() -> None:
    state, now, waits = serving("default", version(7)), 0.0, []
    for _ in range(12):
        state = state.failed(version(7), UpdateOutcome.REFUSED, "no", now)
        assert state.failure is not None
        waits.append(state.failure.retry_at - now)
        assert state.wanted(state.failure.retry_at - 0.01) is None
        now = state.failure.retry_at
        assert state.wanted(now) == version(7)
    assert waits == sorted(waits)
    assert waits[0] == FIRST_WAIT_SECONDS
    assert waits[-1] == LONGEST_WAIT_SECONDS


def test_a_newer_version_is_tried_soon_after_an_older_one_was_refused() -> None:
    state = serving("default", version(7))
    for _ in range(6):
        state = state.failed(version(7), UpdateOutcome.REFUSED, "no", 100)
    state = state.found(version(8), 100)
    assert state.wanted(100) is None
    assert state.wanted(100 + FIRST_WAIT_SECONDS) == version(8)


def test_a_server_that_sleeps_is_left_alone_and_one_that_wakes_up_is_brought_to_the_newest() -> (
    None
):
    sixth, seventh = version(6), version(7)
    asleep = serving(sixth.tag, sixth).saw(ReportedWeights(ASLEEP, paused=True))
    assert asleep.unready(_LIMITS, 0) == "the server is asleep"
    later = asleep.found(seventh, 1)
    for state in (asleep, later):
        assert (state.wanted(1), state.doubtful(1)) == (None, None)
    assert later.ahead(1) == seventh, "it is fetched meanwhile"
    kept = later.saw(ReportedWeights(sixth.tag, paused=False))
    assert kept.wanted(1) == seventh
    same = asleep.saw(ReportedWeights(sixth.tag, paused=False))
    assert (same.wanted(1), same.doubtful(1)) == (None, sixth), "what it kept is proven again"
    lost = asleep.saw(ReportedWeights(DISCARDED, paused=False))
    assert lost.wanted(1) == sixth
    assert lost.unready(_LIMITS, 1) is not None


def test_sleep_is_no_restart_of_a_server_that_is_to_be_started_anew() -> None:
    seventh = version(7)
    state = serving("default").found(seventh, 0)
    for _ in range(2):
        state = loaded(state, seventh, Verdict.REFUTED)
        state = state.failed(seventh, UpdateOutcome.REFUTED, "no", 0)
    assert state.hopeless is not None
    assert state.saw(ReportedWeights(ASLEEP, paused=True)).hopeless is not None


def test_a_server_left_paused_is_updated_at_once_and_then_with_waits() -> None:
    state = serving("default", version(7)).failed(version(7), UpdateOutcome.PAUSED, "hung", 5)
    assert state.wanted(5) == version(7)
    assert state.unready(_LIMITS, 5) == "the server is paused"
    state = state.failed(version(7), UpdateOutcome.PAUSED, "hung", 5)
    assert state.wanted(5) is None


def test_a_failure_is_over_when_the_server_has_the_newest_version_after_all() -> None:
    state = serving("default", version(7)).failed(version(7), UpdateOutcome.PAUSED, "no answer", 5)
    assert state.saw(ReportedWeights(version(7).tag, paused=True)).failure is not None
    assert state.saw(ReportedWeights(version(7).tag, paused=False)).failure is None


def test_a_version_that_is_gone_is_not_tried_before_the_feed_was_asked_again() -> None:
    state = serving("default", version(7)).failed(version(7), UpdateOutcome.GONE, "gone", 0)
    assert state.wanted(1000) is None
    assert state.found(version(6), 1000).wanted(1000) == version(6)


def test_a_server_whose_weights_nobody_has_judged_is_proven_without_a_load() -> None:
    seventh = version(7)
    state = AgentState().saw(ReportedWeights(seventh.tag, paused=False)).found(seventh, 0)
    assert state.wanted(0) is None
    assert state.doubtful(0) == seventh
    assert state.unready(_LIMITS, 0) == f"{seventh.tag} is not proven yet"
    proving = state.entered(AgentPhase.PROVING)
    assert proving.doubtful(0) is None
    assert proving.unready(_LIMITS, 0) == "the server's weights are being proven"
    for verdict in (Verdict.PROVEN, Verdict.ABSENT):
        admitted = proving.judged(judged(seventh.tag, verdict))
        assert admitted.unready(_LIMITS, 0) is None
        assert admitted.doubtful(0) is None


def test_refuted_weights_are_loaded_again_at_once_and_then_with_waits() -> None:
    seventh = version(7)
    state, now = serving("default", seventh), 0.0
    for wait in (0, 2 * FIRST_WAIT_SECONDS, 4 * FIRST_WAIT_SECONDS):
        state = loaded(state, seventh, Verdict.REFUTED)
        state = state.failed(seventh, UpdateOutcome.REFUTED, "for a reason", now)
        state = state.saw(ReportedWeights(seventh.tag, paused=False))
        assert state.doubtful(now + LONGEST_WAIT_SECONDS) is None
        assert "refuted: for a reason" in (state.unready(_LIMITS, now) or "")
        assert wait == 0 or state.wanted(now + wait - 0.01) is None
        assert state.wanted(now + wait) == seventh
        now += wait
    state = state.found(version(8), now)
    assert state.wanted(now + FIRST_WAIT_SECONDS) == version(8)
    assert loaded(state, version(8), Verdict.PROVEN).unready(_LIMITS, now) is None


@pytest.mark.parametrize(("verdict", "most"), [(Verdict.REFUTED, 2), (Verdict.UNPROVEN, 5)])
def test_a_server_whose_weights_stay_unproven_is_started_anew_once(
    verdict: Verdict, most: int
) -> None:
    state = serving("default", version(7))
    for _ in range(most):
        assert state.hopeless is None
        state = loaded(state, version(7), verdict)
    assert f"{most} times in a row" in (state.hopeless or "")
    assert "for a reason" in (state.hopeless or "")
    state = state.entered(AgentPhase.UPDATING)
    assert state.hopeless is not None, "while it is loaded once more it is as it was"
    assert loaded(state, version(8), Verdict.PROVEN).hopeless is None

    state = state.server_failed("killed").saw(_BASE)
    assert state.hopeless is None
    for _ in range(most):
        state = loaded(state, version(7), verdict)
        state = loaded(state, version(8), verdict)
    assert state.hopeless is None, "a new server did not mend it"
    state = loaded(state, version(9), Verdict.PROVEN)
    for _ in range(most):
        assert state.hopeless is None
        state = loaded(state, version(9), verdict)
    assert state.hopeless is not None


def test_a_server_that_was_proven_between_is_not_started_anew() -> None:
    state = serving("default", version(7))
    for verdict in (
        Verdict.REFUTED,
        Verdict.PROVEN,
        Verdict.REFUTED,
        Verdict.UNPROVEN,
        Verdict.REFUTED,
    ):
        state = loaded(state, version(7), verdict)
    assert state.hopeless is None


def test_a_server_without_an_answer_is_asked_again_and_then_loaded_again() -> None:
    seventh = version(7)
    state = loaded(serving("default", seventh), seventh, Verdict.UNPROVEN)
    state = state.failed(seventh, UpdateOutcome.UNPROVEN, "500", 0)
    assert state.doubtful(FIRST_WAIT_SECONDS - 0.01) is None
    assert (state.doubtful(1), state.wanted(1)) == (seventh, None)
    state = state.entered(AgentPhase.PROVING).judged(judged(seventh.tag, Verdict.UNPROVEN))
    state = state.failed(seventh, UpdateOutcome.UNPROVEN, "500", 1)
    assert state.wanted(2.99) is None
    assert (state.doubtful(3), state.wanted(3)) == (None, seventh)
    assert "unproven: for a reason" in (state.unready(_LIMITS, 3) or "")


def test_what_was_proven_holds_while_the_server_refuses_another_version_and_no_longer() -> None:
    sixth, seventh = version(6), version(7)
    state = serving(sixth.tag, sixth, seventh).entered(AgentPhase.UPDATING)
    assert state.failed(seventh, UpdateOutcome.REFUSED, "no", 0).unready(_LIMITS, 0) is None
    lost = state.failed(seventh, UpdateOutcome.ERROR, "lost", 0)
    assert lost.unready(_LIMITS, 0) == f"{sixth.tag} is not proven yet"
    paused = serving(sixth.tag, sixth).saw(ReportedWeights(sixth.tag, paused=True))
    again = paused.saw(ReportedWeights(sixth.tag, paused=False))
    assert again.unready(_LIMITS, 0) is not None
    assert again.doubtful(0) == sixth


_VERSIONS = st.builds(version, st.integers(0, 4), st.integers(0, 2), st.sampled_from(["a", "b"]))
_TAGS = st.one_of(
    st.sampled_from(["default", "3", ASLEEP, DISCARDED]), _VERSIONS.map(lambda each: each.tag)
)
_STEPS = st.one_of(
    st.tuples(st.just("found"), _VERSIONS),
    st.tuples(st.just("saw"), st.builds(ReportedWeights, _TAGS, st.booleans())),
    st.tuples(st.just("away"), st.none()),
    st.tuples(st.just("blind"), st.none()),
    st.tuples(st.just("entered"), st.sampled_from(AgentPhase)),
    st.tuples(st.just("updated"), _VERSIONS),
    st.tuples(st.just("judged"), st.builds(judged, _TAGS, st.sampled_from(Verdict))),
    st.tuples(st.just("failed"), st.tuples(_VERSIONS, st.sampled_from(UpdateOutcome))),
)


@given(st.lists(_STEPS, max_size=30), st.integers(0, 3))
def test_a_ready_server_has_weights_of_the_runs_attempt_within_the_staleness(
    events: list[tuple[str, object]], staleness: int
) -> None:
    limits = ReadinessLimits(staleness, serve_before_first=False, blind_seconds=5)
    state = AgentState()
    admitted: str | None = None  # tag of the weights that the server was last known to have
    for now, (what, value) in enumerate(events):
        if what == "found":
            assert isinstance(value, Version)
            if value.follows(state.newest):
                state = state.found(value, now)
        elif what == "saw":
            assert isinstance(value, ReportedWeights)
            if value.paused or value.tag != admitted:
                admitted = None
            state = state.saw(value)
        elif what == "away":
            state = state.server_failed("away")
        elif what == "blind":
            state = state.feed_failed("away")
        elif what == "entered":
            assert isinstance(value, AgentPhase)
            state = state.entered(value)
        elif what == "updated":
            assert isinstance(value, Version)
            state, admitted = state.updated(value), None
        elif what == "judged":
            assert isinstance(value, Judgement)
            state, admitted = state.judged(value), value.tag if value.admits else None
        else:
            assert isinstance(value, tuple)
            loading = state.phase is AgentPhase.UPDATING and value[1] is not UpdateOutcome.REFUSED
            admitted = None if loading or value[1] is UpdateOutcome.PAUSED else admitted
            state = state.failed(value[0], value[1], "no", now)
        newest, server = state.newest, state.server
        if state.unready(limits, now) is None:
            assert newest is not None
            assert server is not None
            assert not server.paused
            assert state.phase not in (AgentPhase.UPDATING, AgentPhase.PROVING)
            assert server.tag == admitted
            assert state.version is not None
            assert 0 <= newest.step - state.version <= staleness
        if newest is not None and server is not None and state.phase is AgentPhase.WAITING:
            # Whatever happened, the server has the newest weights, or gets them within a minute, or
            # as soon as it wakes up.
            later = now + LONGEST_WAIT_SECONDS
            has = server.tag == newest.tag and not server.paused
            settled = (has and not state.quarantined) or state.missing or server.asleep
            assert settled == (state.wanted(later) is None)
            # And what it has is judged.
            doubtful = has and settled and not state.missing and server.tag != admitted
            assert doubtful == (state.doubtful(later) is not None)
