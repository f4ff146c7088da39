"""The demo itself, as a test: the example learns, loses a trainer, and keeps every promise."""

import pytest
from rich.console import Console

from demo.cli import MANIFEST, load_run
from demo.platform import Platform
from demo.play import Play
from tests.e2e import harness

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]


def test_the_demo_keeps_its_promises(platform: Platform) -> None:
    run = load_run(MANIFEST)
    console = Console(force_terminal=False, width=200)
    promises = Play(platform, console, harness.NAMESPACE, harness.RELEASE).perform(run, 420)
    platform.kubectl.delete("trainingruns", run["metadata"]["name"], harness.NAMESPACE)
    assert [f"{promise.text}: {promise.seen}" for promise in promises if not promise.kept] == []
