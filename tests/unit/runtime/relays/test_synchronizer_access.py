"""`SynchronizerAccess`: one Synchronizer for each attempt, made where the attempt was claimed."""

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
from trainsync.monitor.client.base import MonitorClient
from trainsync.monitor.errors import MonitorUnavailableError
from trainsync.runtime.errors import JoinError
from trainsync.runtime.relays import synchronizer_host
from trainsync.runtime.relays.synchronizer_access import SynchronizerAccess
from trainsync.runtime.settings import RunSettings, read_settings
from trainsync.storage.saves.incarnations import successor
from trainsync.weights.errors import WeightsUnavailableError
from trainsync.weights.synchronizer import actor
from trainsync.weights.synchronizer.handle import SynchronizerHandle
from trainsync.weights.synchronizer.remote import RemoteSynchronizer

NAMESPACE = "trainsync-run-0"
TIMEOUT = 20.0
EXCHANGE = ("call_synchronizer", "synchronizer_calls", "answer_synchronizer")
"""Calls of a monitor that passes on calls to another Ray cluster."""


class Host:
    """Stands for a `SynchronizerHost`."""

    def __init__(self, settings: RunSettings, namespace: str, monitor: Any, resumed: Any) -> None:
        self.given = (settings, namespace, monitor, resumed)
        self.handle = object()
        self.restarts: list[tuple[Any, ...]] = []

    def restart(self, *given: Any) -> None:
        self.restarts.append(given)

    def endings(self) -> Iterator[tuple[str, str]]:
        yield "relay", "it is late"


@pytest.fixture
def settings() -> RunSettings:
    return replace(read_settings({}, "run"), attempt=0, incarnation="aaaaaaaa")


@pytest.fixture
def hosts(monkeypatch: pytest.MonkeyPatch) -> list[Host]:
    """The hosts that were made; Ray is there."""
    made: list[Host] = []

    def make(*given: Any) -> Host:
        made.append(Host(*given))
        return made[-1]

    monkeypatch.setattr("ray.is_initialized", lambda: True)
    monkeypatch.setattr(synchronizer_host, "SynchronizerHost", make)
    return made


def monitor() -> MonitorClient:
    return cast("MonitorClient", SimpleNamespace())


def handle_of(access: SynchronizerAccess, settings: RunSettings) -> Any:
    return access.handle(settings, monitor, lambda: None)


def test_explorers_of_another_cluster_reach_it_by_the_monitor_and_without_ray(
    settings: RunSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ray.is_initialized", lambda: pytest.fail("Ray is asked"))
    apart = replace(settings, trainer_cluster="elsewhere")
    access = SynchronizerAccess(NAMESPACE, claimed_here=True)
    exchange = cast("Any", SimpleNamespace(**dict.fromkeys(EXCHANGE, print)))
    found = access.handle(apart, lambda: exchange, lambda: None)
    assert isinstance(found, RemoteSynchronizer)
    with pytest.raises(JoinError, match="SimpleNamespace passes on no calls to another Ray"):
        handle_of(access, apart)


def test_the_process_that_claimed_makes_one_whatever_the_threads_that_ask(
    settings: RunSettings, hosts: list[Host]
) -> None:
    access = SynchronizerAccess(NAMESPACE, claimed_here=True)
    barrier = threading.Barrier(4, timeout=TIMEOUT)

    def slow() -> None:
        """The checkpoint resumed from, which the monitor takes its time to name."""
        time.sleep(0.01)

    def ask(_: int) -> Any:
        barrier.wait()
        return access.handle(settings, monitor, slow)

    with ThreadPoolExecutor(4) as threads:
        found = list(threads.map(ask, range(4), timeout=TIMEOUT))
    (host,) = hosts
    assert found == [host.handle] * 4
    assert host.given[:2] == (settings, NAMESPACE)


def test_one_that_could_not_be_made_is_made_by_the_next_call(
    settings: RunSettings, hosts: list[Host]
) -> None:
    access = SynchronizerAccess(NAMESPACE, claimed_here=True)

    def away() -> None:
        raise MonitorUnavailableError("the monitor does not answer")

    with pytest.raises(MonitorUnavailableError, match="the monitor does not answer"):
        access.handle(settings, monitor, away)
    assert hosts == []
    assert list(access.endings()) == []
    assert handle_of(access, settings) is hosts[0].handle


def test_other_processes_find_the_actor_and_speak_for_their_incarnation(
    settings: RunSettings, hosts: list[Host], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(actor.Synchronizer, "get_actor", lambda namespace: f"actor of {namespace}")
    access = SynchronizerAccess(NAMESPACE, claimed_here=False)
    restarted = replace(settings, incarnation=successor("aaaaaaaa"))
    assert handle_of(access, settings) == SynchronizerHandle(f"actor of {NAMESPACE}", NAMESPACE, 0)
    assert handle_of(access, restarted).restarts == 1
    assert hosts == []


def test_an_actor_that_does_not_come_is_told_to_processes_that_joined(
    settings: RunSettings, hosts: list[Host], monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(namespace: str) -> None:
        raise WeightsUnavailableError(f"no Synchronizer in {namespace} within 60 s")

    monkeypatch.setattr(actor.Synchronizer, "get_actor", missing)
    access = SynchronizerAccess(NAMESPACE, claimed_here=False)
    with pytest.raises(WeightsUnavailableError, match=f"no Synchronizer in {NAMESPACE}"):
        handle_of(access, settings)


def test_a_restart_in_place_and_the_end_concern_the_one_that_was_made_alone(
    settings: RunSettings, hosts: list[Host]
) -> None:
    access, client = SynchronizerAccess(NAMESPACE, claimed_here=True), monitor()
    restarted = replace(settings, incarnation=successor("aaaaaaaa"))
    access.restart(restarted, client, None)
    assert (hosts, list(access.endings())) == ([], [])
    handle_of(access, restarted)
    access.restart(restarted, client, None)
    assert hosts[0].restarts == [(restarted, client, None)]
    assert list(access.endings()) == [("relay", "it is late")]
