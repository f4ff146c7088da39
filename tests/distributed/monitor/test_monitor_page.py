"""The monitor's page in a real browser: Debian's Chromium, without a window."""

import base64
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from selenium import webdriver
from selenium.webdriver.support.ui import WebDriverWait
from trainsync.api.protocol import ExplorerReport, ProgressReport, WeightsReport
from trainsync.monitor.client.http import HttpMonitorClient
from trainsync.monitor.page import feed

from tests.distributed.monitor.chromium import browser
from tests.unit.monitor.fakes import FakeApi, RunningMonitor, Signer
from tests.unit.monitor.saves import CHECKPOINT, FIRST, request, write, write_all
from tests.waiting import eventually

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(900)]

EVIL = "\"'><img src=x onerror=\"document.title='owned'\"><script>document.title='owned'</script>"
WAIT_SECONDS = 60


@pytest.fixture(scope="module")
def client(
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[tuple[HttpMonitorClient, RunningMonitor]]:
    """A run at step 3 of 4 with a commit, a save in flight, and an explorer with a hostile name."""
    folder = tmp_path_factory.mktemp("page")
    signer = Signer()
    running = RunningMonitor(FakeApi(signer), folder / "run")
    eventually(lambda: httpx.get(f"{running.url}/readyz").status_code == 200)
    (folder / "token").write_text(signer.token())
    made = HttpMonitorClient(
        running.url,
        attempt=FIRST.attempt,
        incarnation=FIRST.incarnation,
        token_file=folder / "token",
    )
    made.claim("main")
    made.register(request(1))
    write_all(folder / "run", FIRST, 1)
    eventually(lambda: made.save_status(CHECKPOINT, 1, 1).state == "committed")
    made.register(request(2))
    write(folder / "run", FIRST, 2, 0)
    made.report_progress(ProgressReport(step=3, total_steps=4, metrics={EVIL: 1.0}))
    explorers = [
        ExplorerReport(id=EVIL[:128], version=1, state="lost", message=EVIL),
        *(ExplorerReport(id=f"explorer-{n}", version=3, state="running") for n in range(30)),
    ]
    made.report_weights(WeightsReport(trainer_version=3, method="nccl", explorers=explorers))
    yield made, running
    made.close()
    running.stop()


def until(driver: webdriver.Chrome, what: str, check: Callable[[], Any]) -> None:
    WebDriverWait(driver, WAIT_SECONDS, 0.1).until(lambda _: check(), what)


def text_of(driver: webdriver.Chrome, element: str) -> str:
    return str(driver.find_element("id", element).text)


def picture(driver: webdriver.Chrome, file: Path) -> tuple[int, int]:
    """Save a picture of the whole page into the test's folder; returns its size."""
    shot = driver.execute_cdp_cmd("Page.captureScreenshot", {"captureBeyondViewport": True})
    data = base64.b64decode(shot["data"])
    file.write_bytes(data)
    width, height = struct.unpack(">II", data[16:24])
    return width, height


def test_the_page_is_live_fits_every_width_and_obeys_no_name(
    client: tuple[HttpMonitorClient, RunningMonitor], tmp_path: Path
) -> None:
    reporter, monitor = client
    with browser() as driver:
        driver.get(monitor.url)
        until(driver, "it is live", lambda: text_of(driver, "live") == "live")
        assert "3 of 4 steps" in text_of(driver, "progress")
        parts = "checkpoint 2: 1 of 2 parts"  # no hint about the part: the next scan finds it
        until(driver, parts, lambda: parts in text_of(driver, "checkpoint"))
        assert "19 explorers" in text_of(driver, "weights")
        driver.find_element("css selector", "#weights summary").click()
        reporter.report_progress(ProgressReport(step=4, total_steps=4, metrics={EVIL: 2.0}))
        until(driver, "step 4", lambda: "4 of 4 steps" in text_of(driver, "progress"))
        reporter.report_weights(
            WeightsReport(
                trainer_version=4,
                method="nccl",
                explorers=[
                    ExplorerReport(id=f"explorer-{n}", version=4, state="running")
                    for n in range(30)
                ],
            )
        )
        until(driver, "version 4", lambda: "version 4" in text_of(driver, "weights"))
        opened = driver.find_elements("css selector", "#weights details[open]")
        assert len(opened) == 1, "what a person unfolded stays unfolded"

        assert driver.title == "run · Pending"
        assert driver.find_elements("css selector", "img, iframe, link, object") == []
        for width in (1280, 768, 390, 320):
            size = {"width": width, "height": 800, "deviceScaleFactor": 1, "mobile": width < 500}
            driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
            wide = driver.execute_script("return document.documentElement.scrollWidth")
            assert wide <= width
            assert picture(driver, tmp_path / f"{width}.png")[1] > 800
        # No script, style or request was refused by the page's policy, and nothing was missing.
        assert [entry["message"] for entry in driver.get_log("browser")] == []


def test_the_colours_follow_the_browser(
    client: tuple[HttpMonitorClient, RunningMonitor], tmp_path: Path
) -> None:
    _, monitor = client
    with browser(dark=True) as driver:
        driver.get(monitor.url)
        script = "return getComputedStyle(document.body).backgroundColor"
        dark = driver.execute_script(script)
        picture(driver, tmp_path / "dark.png")
        light = {"name": "prefers-color-scheme", "value": "light"}
        driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [light]})
        assert dark == "rgb(15, 20, 27)"
        assert driver.execute_script(script) == "rgb(246, 247, 249)"


def test_without_javascript_the_page_says_the_same(
    client: tuple[HttpMonitorClient, RunningMonitor], tmp_path: Path
) -> None:
    _, monitor = client
    with browser(script=False) as driver:
        driver.get(monitor.url)
        assert "of 4 steps" in text_of(driver, "progress")
        assert "step 1" in text_of(driver, "checkpoint")
        assert text_of(driver, "live").startswith("as of ")
        assert driver.find_elements("css selector", "svg.timeline .save")
        picture(driver, tmp_path / "noscript.png")


def test_a_page_that_was_refused_becomes_live_when_there_is_a_place(
    client: tuple[HttpMonitorClient, RunningMonitor], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, monitor = client
    with browser() as driver:
        with monkeypatch.context() as none_free:
            none_free.setattr(feed, "MOST_STREAMS", 0)
            driver.get(monitor.url)
            until(driver, "it says so", lambda: "not connected" in text_of(driver, "live"))
        until(driver, "it is live", lambda: text_of(driver, "live") == "live")


def test_a_page_whose_monitor_ends_says_so(tmp_path: Path) -> None:
    running = RunningMonitor(FakeApi(Signer()), tmp_path / "run")
    with browser() as driver:
        driver.get(running.url)
        until(driver, "it is live", lambda: text_of(driver, "live") == "live")
        running.stop()
        until(driver, "it says so", lambda: "not connected" in text_of(driver, "live"))
