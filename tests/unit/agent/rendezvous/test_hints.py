"""How often the directory is looked at, and what an agent reports. No sockets."""

import threading
import time
from dataclasses import replace

from trainsync.agent.admission.judgement import Judgement, Verdict
from trainsync.agent.rendezvous.hints import Hints
from trainsync.agent.rendezvous.report import report_of
from trainsync.agent.state import (
    AgentPhase,
    AgentState,
    ReadinessLimits,
    ReportedWeights,
    UpdateOutcome,
)
from trainsync.agent.version import Version, on_volume
from trainsync.api.protocol import CommitNotice, SaveKind, ServerNews

LIMITS = ReadinessLimits(1, serve_before_first=False, blind_seconds=60.0)
KNOWN = Version("u", 0, "sha256:" + "0" * 64, on_volume(5, "global_step_5", "sha256:5", 10, 0))


def news(digest: str | None) -> ServerNews:
    if digest is None:
        return ServerNews(mark="0/")
    notice = CommitNotice(
        kind=SaveKind.STATE_DICT, attempt=0, step=5, path="x", manifest_digest=digest, bytes=1
    )
    return ServerNews(mark=f"0/{digest}", newest=notice)


def test_the_directory_is_looked_at_seldom_only_while_the_monitor_tells_of_what_is_known() -> None:
    hints = Hints(300)
    assert not hints.agree(None)  # it was not asked yet
    hints.heard(ServerNews(mark=""))
    assert not hints.agree(None)  # it does not know yet
    hints.heard(news(None))
    assert hints.agree(None)
    assert not hints.agree(KNOWN)
    hints.heard(news("sha256:5"))
    assert hints.agree(KNOWN)
    hints.heard(news("sha256:6"))  # which the volume does not show yet
    assert not hints.agree(KNOWN)
    hints.heard(None)
    assert not hints.agree(KNOWN)
    began = time.monotonic()
    hints.pause(KNOWN)
    assert time.monotonic() - began < 100


def test_a_look_is_due_at_once_when_the_monitor_tells_of_another_version_or_goes_away() -> None:
    for word in (news("sha256:6"), None):
        hints = Hints(300)
        hints.heard(news("sha256:5"))
        thread = threading.Thread(target=hints.pause, args=(KNOWN,))
        thread.start()
        hints.heard(word)
        thread.join(60)
        assert not thread.is_alive()
    closed = Hints(300)
    closed.heard(news("sha256:5"))
    closed.close()
    closed.pause(KNOWN)


def report(state: AgentState) -> dict[str, object]:
    made = report_of(state, LIMITS, 1.0, servers="rollouts", endpoint=None, agent=None, known="m")
    return made.to_json_dict()


def test_a_report_says_what_the_server_has_and_why_it_is_not_ready() -> None:
    state = AgentState().server_failed("refused")
    assert report(state) == {
        "servers": "rollouts",
        "ready": False,
        "proven": False,
        "refutations": 0,
        "message": "the server does not answer: refused",
        "known": "m",
    }
    state = state.found(KNOWN, 1.0).saw(ReportedWeights("9" * 40, paused=False))
    assert "version" not in report(state)  # no step is so late
    state = state.saw(ReportedWeights("x" * 500, paused=False))
    assert len(str(report(state)["tag"])) == 128
    state = state.updated(KNOWN).judged(Judgement(KNOWN.tag, Verdict.PROVEN))
    assert report(state) == {
        "servers": "rollouts",
        "tag": KNOWN.tag,
        "version": 5,
        "lag": 0,
        "ready": True,
        "verdict": "proven",
        "proven": True,
        "refutations": 0,
        "known": "m",
    }
    state = state.failed(KNOWN, UpdateOutcome.NO_MEMORY, "full" * 100, 1.0)
    said = str(report(state)["message"])
    assert said.startswith("no_memory: fullfull")
    assert len(said) == 256


def test_the_last_judgement_is_reported_while_a_server_takes_a_version() -> None:
    state = AgentState().found(KNOWN, 1.0).updated(KNOWN)
    state = state.judged(Judgement(KNOWN.tag, Verdict.REFUTED, "off by 3"))
    state = replace(state, phase=AgentPhase.UPDATING)
    assert (state.refutations, report(state)["verdict"]) == (1, "refuted")
    assert report(state)["message"] == "off by 3"
    state = state.updated(KNOWN)
    assert (state.judgement, report(state)["verdict"]) == (None, "refuted")
    state = state.judged(Judgement(KNOWN.tag, Verdict.PROVEN))
    assert (state.refutations, report(state)["verdict"]) == (1, "proven")
    assert "message" not in report(state)
    state = state.updated(KNOWN)
    assert (report(state)["verdict"], report(state)["proven"]) == ("proven", False), "of before"
