"""The page's HTML, read by a parser, as a browser would."""

import re
from html.parser import HTMLParser
from typing import Any

import pytest
from trainsync.api.page import AttemptStart, News, NewsKind
from trainsync.api.protocol import SaveKind
from trainsync.api.status import (
    AccountStatus,
    AccountUnit,
    CheckpointStatus,
    Progress,
    RoleAccount,
    ServerWeights,
    WeightsStatus,
)
from trainsync.api.words import clean
from trainsync.monitor.page import document, timeline_svg

from tests.unit.monitor.page.pages import EVIL, NOW, before, explorers, page, saves

VOID = {"meta", "img", "br"}


class Reader(HTMLParser):
    """Elements with their attributes, all text, and tags that do not match."""

    def __init__(self, source: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.open: list[str] = []
        self.feed(source)
        self.close()
        self.text = " ".join(" ".join(self.words).split())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open, f"</{tag}> closes nothing"
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if not self.open or self.open[-1] not in ("style", "script"):
            self.words.append(data)

    def tags(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.elements if name == tag]


def read(**changed: Any) -> Reader:
    reader = Reader(document.render(page(**changed)))
    assert reader.open == []
    return reader


def test_the_account_is_a_table_of_shares() -> None:
    trainer = RoleAccount(role="Trainer", seconds=200, classes={"train": 150, "restart": 50})
    explorer = RoleAccount(role="Explorer", seconds=100, classes={"generate": 50, "restart": 50})
    account = AccountStatus(
        unit=AccountUnit.GPU, since=before(600), goodput=2 / 3, roles=[trainer, explorer]
    )
    text = read(account=account).text
    assert "Account 66.7% goodput class Trainer Explorer train 75.0% generate 50.0%" in text
    assert "restart 25.0% 50.0% Of the seconds of GPUs." in text
    assert "Nothing is accounted for yet." in read().text


def test_the_page_says_everything_without_its_script() -> None:
    text = read().text
    for part in (
        "run Running",
        "attempt 1, 1 restart, for 10 min",
        "45 of 60 steps 75%",
        "12.5 steps a minute",
        "done in 1 min 12 s",
        "reported 2 s ago",
        "reward 0.824",
        "step 40 30 s ago",
        "checkpoint 45: 3 of 4 parts",
        "version 45",
        "e-1 9 1 running",
        "Explorer e-1 is lost. 1 min 30 s ago",
        "NotAllReady: a pod is Pending",
        "as of 2026-01-01 12:00:00 UTC",
    ):
        assert part in text, text


def test_restarts_by_the_infrastructure_are_told_where_there_were_some() -> None:
    text = read(attempt=3, infrastructure_restarts=2).text
    assert "attempt 3, 1 restart and 2 by the infrastructure, for 10 min" in text


def test_a_run_of_which_nothing_is_known_has_a_page() -> None:
    text = read(
        phase="Pending",
        progress=None,
        checkpoint=None,
        weights=None,
        conditions=[],
        attempts=[],
        saves=[],
        news=[],
        start_time=None,
        problem="The monitor's core failed",
    ).text
    for part in ("has not reported yet", "Nothing is committed yet", "Nothing has happened yet"):
        assert part in text
    assert "The monitor's core failed" in text


def test_nothing_is_fetched_and_no_style_or_handler_is_inline() -> None:
    reader = read()
    for tag, attributes in reader.elements:
        assert not {"src", "style", "srcset"} & set(attributes), (tag, attributes)
        assert not [name for name in attributes if name.startswith("on")]
        assert tag == "a" or not (attributes.get("href") or "").startswith(("http", "//", "/"))
    assert not reader.tags("link")
    policy = document.HEADERS["Content-Security-Policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy


def test_names_from_elsewhere_are_text_wherever_they_are() -> None:
    reader = read(
        run=EVIL,
        namespace=EVIL,
        phase=EVIL,
        problem=EVIL,
        progress=Progress(
            step=1,
            last_report_time=NOW,
            metrics={EVIL: 1.0},
            links={EVIL: f"https://{EVIL}", "script": "javascript:evil()"},
        ),
        checkpoint=CheckpointStatus(last_error=EVIL),
        weights=WeightsStatus(
            trainer_version=1,
            lag=0,
            method=EVIL,
            explorers=explorers(1, id=EVIL, state="lost", message=EVIL),
            servers=[
                ServerWeights(
                    name=EVIL, servers=EVIL, version=1, lag=0, ready=False, message=EVIL, tag=EVIL
                )
            ],
        ),
        weights_taken={EVIL: 1},
        attempts=[AttemptStart(attempt=0, cluster=EVIL, time=before(5))],
        news=[News(time=NOW, kind=NewsKind.FAULT, text=EVIL)],
    )
    assert len(reader.tags("script")) == 1
    assert reader.tags("img") == []
    assert [a["href"] for a in reader.tags("a") if "rel" in a] == [f"https://{clean(EVIL)}"]
    assert not [a for _, a in reader.elements for key in a if key.startswith("on")]
    assert reader.text.count("<script>evil()</script>") >= 8
    assert "\x1b" not in reader.text
    assert "\u202e" not in reader.text


def test_links_lead_elsewhere_and_take_nothing_along() -> None:
    links = {"W&B": "https://wandb.test/run?a=1&b=2"}
    reader = read(progress=Progress(step=1, last_report_time=NOW, links=links))
    (link,) = (a for a in reader.tags("a") if "rel" in a)
    assert link["href"] == links["W&B"]
    assert link["rel"] == "noopener noreferrer"
    assert "W&B" in reader.text


def test_thousands_of_saves_make_a_small_page() -> None:
    many = [*saves(5000), *saves(5000, SaveKind.STATE_DICT)]
    made = document.render(page(saves=many, attempts=[], news=[]))
    assert len(made.encode()) < 100_000
    drawn = timeline_svg.timeline(page(saves=many))
    counts = [int(n) for n in re.findall(r"<title>(\d+) checkpoints, steps", drawn)]
    assert sum(counts) == 5000
    assert len(counts) < 200


def test_many_explorers_are_behind_a_fold_the_worst_first() -> None:
    crowd = [*explorers(255), *explorers(1, id="late", lag=7)]
    weights = WeightsStatus(trainer_version=9, lag=7, method="nccl", explorers=crowd)
    made = document.render(page(weights=weights))
    assert made.index("late") < made.index("e-0")
    assert "244 explorers that lag no more" in made


def test_what_explorers_took_is_told_by_the_ways_that_were_used() -> None:
    taken = {"whole": 5800, "delta": 0, "shared_memory": 1200}
    assert "5.8 kB whole, 1.2 kB shared memory" in read(weights_taken=taken).text
    assert "taken so far" not in read(weights_taken={"whole": 0}).text


def test_hundreds_of_attempts_are_drawn_within_the_picture() -> None:
    attempts = [AttemptStart(attempt=n, cluster="main", time=before(999 - n)) for n in range(200)]
    drawn = timeline_svg.timeline(page(attempts=attempts, saves=[], news=[]))
    places = [float(x) for x in re.findall(r' x="([\d.]+)%"', drawn)]
    assert min(places) >= 0
    assert max(places) <= 100
    assert drawn.count('class="attempt') == 60


@pytest.mark.parametrize("span", [0, 1, 86400 * 300])
def test_any_span_of_time_can_be_drawn(span: int) -> None:
    attempts = [AttemptStart(attempt=0, cluster="main", time=before(span))]
    drawn = timeline_svg.timeline(page(attempts=attempts, saves=saves(1), news=[], start_time=None))
    assert "nan" not in drawn
    assert 'class="attempt even"' in drawn


def test_progress_beyond_its_total_and_without_one_are_shown() -> None:
    beyond = Progress(step=70, total_steps=60, last_report_time=NOW)
    assert "70 of 60 steps 100%" in read(progress=beyond).text
    endless = Progress(step=1_234_567, last_report_time=NOW)
    assert "1,234,567 steps" in read(progress=endless).text
