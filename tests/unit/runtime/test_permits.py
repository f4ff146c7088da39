"""Which permits a process gets, from `checkpoint.saveStrategy`."""

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from trainsync.api.protocol import SaveKind, SaveState
from trainsync.api.spec import SaveStrategy
from trainsync.checkpoint.errors import PermitTimeoutError
from trainsync.checkpoint.save.permits import FilePermits, MonitorPermits
from trainsync.checkpoint.save.registration import all_ranks
from trainsync.monitor.client.http import HttpMonitorClient
from trainsync.runtime.clients import open_client, open_permits
from trainsync.runtime.context import RunContext
from trainsync.runtime.errors import JoinError
from trainsync.runtime.settings import RunSettings, read_settings

from tests.unit.runtime.test_settings import CLUSTER

JOINED = {"TRAINSYNC_ATTEMPT": "3", "TRAINSYNC_INCARNATION": "abcdef0123456789"}


def cluster_settings(strategy: SaveStrategy) -> RunSettings:
    settings = read_settings(CLUSTER | JOINED)
    return replace(settings, checkpoint=replace(settings.checkpoint, save_strategy=strategy))


def test_all_ranks_may_write_unless_the_strategy_limits_them() -> None:
    settings = cluster_settings(SaveStrategy.UNRESTRICTED)
    assert open_permits(settings, open_client(settings, hosting=False)) is None


def test_on_kubernetes_the_monitor_grants_and_a_scope_is_the_pods_node() -> None:
    settings = cluster_settings(SaveStrategy.SINGLE_NODE)
    client = open_client(settings, hosting=False)
    assert isinstance(client, HttpMonitorClient)
    made = open_permits(settings, client, {"TRAINSYNC_NODE_NAME": "gpu-7"})
    assert isinstance(made, MonitorPermits)
    assert made._scope() == "gpu-7"
    client.close()


def test_a_client_that_grants_no_permits_is_an_error_and_not_no_limit(tmp_path: Path) -> None:
    settings = cluster_settings(SaveStrategy.SINGLE_NODE)
    local = read_settings(JOINED, tmp_path)
    with pytest.raises(JoinError, match="DiskMonitorClient grants no permits, as single_node"):
        open_permits(settings, open_client(local, hosting=False))


@pytest.mark.parametrize("strategy", ["single_node", "single_process", "single_thread"])
def test_a_local_run_saves_and_commits_under_every_strategy(tmp_path: Path, strategy: str) -> None:
    environ = {"TRAINSYNC_CHECKPOINT_SAVE_STRATEGY": strategy}
    with RunContext.from_env(tmp_path, environ=environ) as context:
        coordinator = context.coordinator(0, 1)
        for name in ("model", "optim"):
            coordinator.save_async(name, {"a": torch.ones(3)}, 5)
        names = all_ranks("model", "optim", world_size=1)
        asyncio.run(coordinator.register_and_monitor(5, checkpoint_participants=names))
        assert context.monitor.save_status(SaveKind.CHECKPOINT, 5).state is SaveState.COMMITTED


def test_the_coordinators_of_a_local_run_share_a_lock_file(tmp_path: Path) -> None:
    environ = {"TRAINSYNC_CHECKPOINT_SAVE_STRATEGY": "single_thread"}
    with RunContext.from_env(tmp_path, environ=environ) as context:
        lock = tmp_path / ".trainsync" / "write.lock"
        held = FilePermits(lock, SaveStrategy.SINGLE_THREAD)
        context.coordinator(0, 1)
        permits = open_permits(context._settings, context.monitor)
        assert isinstance(permits, FilePermits)
        short = FilePermits(lock, SaveStrategy.SINGLE_THREAD, timeout=0.05)
        with permits.hold("a"), pytest.raises(PermitTimeoutError), short.hold("b"):
            pytest.fail("granted twice")
        with held.hold("c"):
            pass
