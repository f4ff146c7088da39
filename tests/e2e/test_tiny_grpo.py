"""The demo as a test: the example learns, loses a trainer, and keeps every promise."""

import time
from pathlib import Path

import pytest
from rich.console import Console

from demo.cli import MANIFEST, load_run
from demo.platform import Platform
from demo.play import Play
from monitoring.rules import Pace
from tests.e2e import harness, panels
from tests.e2e.command_line import CommandLine, check
from tests.e2e.watching import watching

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]


def test_the_demo_keeps_its_promises_and_every_panel_shows_it(
    platform: Platform, tmp_path: Path
) -> None:
    run = load_run(MANIFEST)
    name = run["metadata"]["name"]
    console = Console(force_terminal=False, width=200)
    began = time.time()
    with watching(platform.kubectl, name, tmp_path, Pace()) as prometheus:
        play = Play(platform, console, harness.NAMESPACE, harness.RELEASE)
        promises = play.perform(run, 420)
        variables = {"namespace": harness.NAMESPACE, "run": name}
        empty = [
            question
            for dashboard in panels.dashboards().values()
            for question in panels.empty(prometheus, dashboard, variables, began)
        ]
        drawn = panels.draw_all(prometheus, variables, began, tmp_path)
    command = CommandLine(platform.kubectl.kubeconfig, harness.NAMESPACE)
    check(command, platform.kubectl, name)
    platform.kubectl.delete("trainingruns", name, harness.NAMESPACE)
    assert [f"{promise.text}: {promise.seen}" for promise in promises if not promise.kept] == []
    assert empty == [], "queries without data"
    assert all(10_000 < path.stat().st_size < 150_000 for path in drawn)
