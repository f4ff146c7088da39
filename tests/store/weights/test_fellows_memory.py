"""Agents that pass versions on where their memory has little room, on a real S3 server."""

import logging
import os
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch

from tests.store.conftest import Place
from tests.store.weights.test_fellows import FETCHED, Run, weights
from tests.unit.agent.conftest import has

pytestmark = pytest.mark.timeout(300)

UNHELD = "trainsync_agent_unheld_versions_total"
Mounts = Callable[[str, int], None]


@pytest.fixture
def mount(tmp_path: Path) -> Iterator[Mounts]:
    """Makes the memory of a server, of so many MiB."""
    if os.geteuid() != 0:
        pytest.skip("mounting a tmpfs needs root")
    with ExitStack() as stack:

        def do(name: str, size: int) -> None:
            folder = tmp_path / name
            folder.mkdir()
            command = ["mount", "-t", "tmpfs", "-o", f"size={size}m", "none", str(folder)]
            subprocess.run(command, check=True, timeout=20)
            stack.callback(subprocess.run, ["umount", "-l", str(folder)], check=True, timeout=20)

        yield do


@pytest.fixture
def run(mount: Mounts, place: Place, tmp_path: Path) -> Iterator[Run]:
    """Its servers end before their memory does."""
    with ExitStack() as stack:
        yield Run(place, tmp_path, stack)


def test_a_version_is_held_where_it_and_what_is_staged_have_room(run: Run, mount: Mounts) -> None:
    for name in ("server-0", "server-1"):
        mount(name, 28)  # three and a half times a version: two are staged, one is held
    agents = [run.start(name, "--fellows") for name in ("server-0", "server-1")]
    run.until_all_know(1)
    for step in (1, 2, 3):
        size = run.commit(step)
        for agent, vllm in zip(agents, run.servers.values(), strict=True):
            agent.until_ready_with(step)
            assert has(vllm, weights(step))
    assert agents[1].metric(FETCHED % "fellow") == 3 * size
    assert [agent.metric(UNHELD) for agent in agents] == [0, 0]


def test_where_memory_has_room_for_staging_alone_nothing_is_held_and_versions_are_served(
    run: Run, mount: Mounts, caplog: pytest.LogCaptureFixture
) -> None:
    mount("server-0", 20)  # two and a half times a version
    with caplog.at_level(logging.WARNING):
        agent = run.start("server-0", "--fellows")
        for step in (1, 2, 3):
            run.commit(step)
            agent.until_ready_with(step)
            assert has(run.servers["server-0"], weights(step))
    assert agent.metric(UNHELD) == 3
    assert agent.metric('trainsync_agent_updates_total{outcome="no_memory"}') == 0
    assert _told(caplog) == 1


def test_what_is_held_is_given_up_where_the_version_is_larger_than_it_was_taken_for(
    run: Run, mount: Mounts, caplog: pytest.LogCaptureFixture
) -> None:
    """Files of bfloat16 are staged as float32: that was not known before the first version."""
    mount("server-0", 18)  # a version's files, and one and a half of the two that are staged
    with caplog.at_level(logging.WARNING):
        agent = run.start("server-0", "--fellows", "--dtype=float32")
        for step in (1, 2):
            run.commit(step, torch.bfloat16)
            agent.until_ready_with(step)
            expected = {n: t.bfloat16().float() for n, t in weights(step).items()}
            assert has(run.servers["server-0"], expected)
    assert agent.metric(UNHELD) == 2
    assert agent.metric('trainsync_agent_updates_total{outcome="no_memory"}') == 0
    assert _told(caplog) == 1


def _told(caplog: pytest.LogCaptureFixture) -> int:
    return sum("not held for fellows" in line for line in caplog.messages)
