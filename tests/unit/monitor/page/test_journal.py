import threading
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

from trainsync.api.page import NewsKind
from trainsync.api.status import CheckpointStatus, ExplorerStatus, WeightsStatus
from trainsync.monitor.core.views import CoreView, RestartView
from trainsync.monitor.ledger.saves import CommittedInfo
from trainsync.monitor.page.journal import Journal

from tests.unit.monitor.page.pages import explorers
from tests.unit.monitor.saves import CHECKPOINT, FIRST, Clock

FAULT, RECOVERY, PLAIN = NewsKind.FAULT, NewsKind.RECOVERY, NewsKind.PLAIN


def view(*who: ExplorerStatus, error: str | None = None, attempt: int | None = 0) -> CoreView:
    weights = WeightsStatus(trainer_version=9, lag=0, method="nccl", explorers=list(who))
    return CoreView(
        attempt=attempt,
        progress=None,
        checkpoint=CheckpointStatus(last_error=error),
        weights=weights if who else None,
        conditions=(),
    )


def told(*views: CoreView) -> list[tuple[NewsKind, str]]:
    journal = Journal(Clock())
    for each in views:
        journal.see(each)
    return [(news.kind, news.text) for news in journal.news()]


def one(**changed: Any) -> ExplorerStatus:
    return explorers(1, **changed)[0]


def test_what_stays_as_it_is_is_no_news() -> None:
    assert told(view(), view(one()), view(one()), view(one(version=10))) == []


def test_a_lost_explorer_and_its_return_are_told_once() -> None:
    lost = one(state="lost", message="no sign of life for 30 s")
    assert told(view(one()), view(lost), view(lost), view(one())) == [
        (FAULT, "Explorer e-0 is lost: no sign of life for 30 s."),
        (RECOVERY, "Explorer e-0 is back."),
    ]


def test_a_crowd_that_is_lost_at_once_is_one_line() -> None:
    ((kind, text),) = told(view(*explorers(256, state="lost")))
    assert kind is FAULT
    assert text == "256 explorers are lost: e-0, e-1, e-2, e-3 and 252 more."


def test_a_version_that_is_refused_is_a_fault() -> None:
    refused = one(message="out of memory")
    assert told(view(one()), view(refused), view(refused)) == [
        (FAULT, "Explorer e-0 refused a version: out of memory.")
    ]


def test_an_error_of_the_volume_and_its_end_are_told() -> None:
    assert told(view(), view(error="disk full"), view(error="disk full"), view()) == [
        (FAULT, "disk full"),
        (RECOVERY, "Saves are committed again."),
    ]


def test_a_new_attempt_is_told_but_not_the_one_that_was_found() -> None:
    assert told(view(attempt=None), view(attempt=3), view(attempt=4)) == [
        (PLAIN, "Attempt 4 began; attempt 3 is over.")
    ]


def test_a_restart_in_place_is_told_but_not_the_one_that_was_found() -> None:
    found = replace(view(), restarts=RestartView(1))
    again = replace(view(), restarts=RestartView(2, reason="rank 1 died"))
    assert told(found, found) == []
    assert told(found, again, again, view(attempt=1)) == [
        (FAULT, "Attempt 0 was restarted in its pods (2): rank 1 died"),
        (PLAIN, "Attempt 1 began; attempt 0 is over."),
    ]


def test_the_same_again_only_counts() -> None:
    journal = Journal(Clock())
    for error in ("a", "b", "b", "b"):
        journal._tell(FAULT, error)
    assert [(news.text, news.count) for news in journal.news()] == [("a", 1), ("b", 3)]


def test_it_keeps_no_more_than_it_may() -> None:
    journal = Journal(Clock())
    for number in range(500):
        journal.see(view(error=f"error {number}"))
    assert len(journal.news()) == 100
    assert journal.news()[-1].text == "error 499"


def test_commits_may_be_told_by_another_thread_while_they_are_read() -> None:
    journal = Journal(lambda: datetime.now(UTC))
    info = CommittedInfo(1, FIRST, "sha256:0", 1, datetime.now(UTC))

    def commit() -> None:
        for _ in range(3000):
            journal.committed(CHECKPOINT, info, 0.1)

    thread = threading.Thread(target=commit)
    thread.start()
    while thread.is_alive():
        journal.saves()
    assert len(journal.saves()) == 2000
