"""A run that saves straight into a bucket, with no volume, on a real S3 server."""

import re
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from trainsync import RunContext
from trainsync.api.protocol import SaveKind, SaveState
from trainsync.checkpoint.coordinator import CheckpointCoordinator
from trainsync.checkpoint.errors import (
    SaveAbortedError,
    SaveFailedError,
    UnsupportedPlaceError,
)
from trainsync.checkpoint.load.loading import load_shard
from trainsync.checkpoint.load.resume import Resume
from trainsync.checkpoint.save.registration import all_ranks
from trainsync.monitor.client.store import StoreMonitorClient, StoreRankClient
from trainsync.monitor.core.core import CoreSettings
from trainsync.monitor.errors import ClaimRefusedError, FencedError
from trainsync.storage.objects import commits
from trainsync.storage.objects.live.term import read_term

from tests.store.conftest import Place
from tests.store.processes.forked import run_killed
from tests.store.servers.fault_proxy import Fault
from tests.unit.cli.commands import document, findings
from tests.waiting import eventually

CHECKPOINT = SaveKind.CHECKPOINT
PATH = "actor/model_world_size_{}_rank_{}.pt"


def weights(step: int, size: int = 1000) -> dict[str, torch.Tensor]:
    return {"weight": torch.arange(size, dtype=torch.float32) + step}


@contextmanager
def monitor(place: Place, attempt: int, **settings: Any) -> Iterator[StoreMonitorClient]:
    """The monitor of an attempt, in this process."""
    client = StoreMonitorClient(
        place.open(),
        attempt=attempt,
        incarnation=secrets.token_hex(8),
        settings=CoreSettings(**settings),
        tick_seconds=0.1,
        timeout_seconds=60,
    )
    try:
        client.claim("local")
        yield client
    finally:
        client.close()


def coordinator(place: Place, client: StoreMonitorClient, **given: Any) -> CheckpointCoordinator:
    return CheckpointCoordinator(client, place.url(), **given)


def save(place: Place, client: StoreMonitorClient, step: int, size: int = 1000) -> None:
    saving = coordinator(place, client)
    saving.register(step, checkpoint_participants=all_ranks("model", world_size=1))
    saving.save_async("model", weights(step, size), step)
    saving.finish(step, timeout=60)


def loaded(resume: Resume | None, size: int = 1) -> torch.Tensor:
    assert resume is not None
    state = load_shard(resume, PATH.format(size, 0))
    weight: torch.Tensor = state["weight"]
    return weight


def test_a_run_without_a_volume_goes_on_from_its_bucket(place: Place) -> None:
    with RunContext.from_env(place.url()) as ctx:
        assert ctx.attempt == 0
        assert ctx.resume() is None
        saving = ctx.coordinator()
        for step in (1, 2):
            saving.register(step, checkpoint_participants=all_ranks("model", world_size=1))
            saving.save_async("model", weights(step), step, attachments={"note.json": b"{}"})
            assert saving.finish(step, timeout=60) is not None
    with RunContext.from_env(place.url()) as ctx:
        assert ctx.attempt == 1
        resume = ctx.resume()
        assert resume is not None
        assert resume.step == 2
        assert torch.equal(loaded(resume), weights(2)["weight"])
    assert [s["step"] for s in document("ls", place.url(), code=0)["saves"]] == [1, 2]
    assert findings("verify", place.url(), code=0) == []
    assert (place.files / "runs/a/latest_checkpointed_iteration.txt").read_text() == "2\n"


def test_large_shards_go_in_parts_and_come_in_ranges(place: Place) -> None:
    size = 6 << 20  # 24 MB: three parts
    with monitor(place, 0) as client:
        save(place, client, 1, size)
    parts = [path for method, path in place.proxy.asked if method == "PUT" and "partNumber" in path]
    assert len(parts) >= 3
    with RunContext.from_env(place.url()) as ctx:
        resume = ctx.resume()
        before = len(place.proxy.asked)
        assert torch.equal(loaded(resume), weights(1, size)["weight"])
        gets = [path for method, path in place.proxy.asked[before:] if method == "GET"]
        assert len([path for path in gets if "/objects/" in path]) >= 3


def test_ranks_speak_through_the_bucket_alone(place: Place) -> None:
    with monitor(place, 0) as host:
        other = StoreRankClient(place.open(), attempt=0, incarnation=host.incarnation)
        other.claim("local")
        first = CheckpointCoordinator(host, place.url(), rank=0, world_size=2)
        second = CheckpointCoordinator(other, place.url(), rank=1, world_size=2)
        second.register(5, checkpoint_participants=all_ranks("model", world_size=2))
        for saving in (second, first):
            saving.save_async("model", weights(5), 5)
        assert first.finish(5, timeout=60) is not None
        assert second.finish(5, timeout=60) is not None
        assert host.resume() == other.resume()
    stored = commits.read_manifest(place.open(), CHECKPOINT, 5)
    assert set(stored.keys) == {PATH.format(2, 0), PATH.format(2, 1)}


def test_a_rank_that_fails_aborts_the_save_for_all_and_leaves_no_object(place: Place) -> None:
    with monitor(place, 0) as host:
        other = StoreRankClient(place.open(), attempt=0, incarnation=host.incarnation)
        first = CheckpointCoordinator(host, place.url(), rank=0, world_size=2)
        second = CheckpointCoordinator(other, place.url(), rank=1, world_size=2)
        first.register(5, checkpoint_participants=all_ranks("model", world_size=2))
        first.save_async("model", weights(5), 5)
        first.wait_all(60)

        def fail(directory: object) -> None:
            raise RuntimeError(f"no room in {directory}")

        with pytest.raises(SaveFailedError, match="no room"):
            second.save_sync("model", fail, 5)
        assert host.save_status(CHECKPOINT, 5, 20).state is SaveState.ABORTED
        with pytest.raises(SaveAbortedError, match="no room"):
            first.finish(5, timeout=60)
    assert commits.committed_steps(place.open(), CHECKPOINT) == []
    assert [key for key in place.objects() if "/objects/" in key] == []


def test_the_monitor_of_an_attempt_that_is_over_commits_nothing(place: Place) -> None:
    with monitor(place, 0) as old:
        save(place, old, 1)
        saving = coordinator(place, old)
        saving.register(2, checkpoint_participants=[("model", 0), ("optim", 0)])
        saving.save_async("model", weights(2), 2)
        saving.wait_all(60)
        with monitor(place, 1) as new:
            assert new.resume() is not None
            before = place.objects()
            saving.save_sync("optim", weights(2), 2)  # the save of the old attempt is complete now
            eventually(lambda: is_fenced(old))
            with pytest.raises(FencedError, match="taken over"):
                old.save_status(CHECKPOINT, 2)
            assert [key for key in place.objects() if "manifests/" in key] == [
                key for key in before if "manifests/" in key
            ]
            save(place, new, 2)
    assert commits.committed_steps(place.open(), CHECKPOINT) == [1, 2]
    term = read_term(place.open())
    assert term is not None
    assert term.attempt == 1


def is_fenced(client: StoreMonitorClient) -> bool:
    try:
        client.save_status(CHECKPOINT, 2)
    except FencedError:
        return True
    return False


def test_an_attempt_is_claimed_once(place: Place) -> None:
    with (
        monitor(place, 3),
        pytest.raises(ClaimRefusedError, match=r"attempt 3 .* is claimed by|holds|taken"),
        monitor(place, 3),
    ):
        pass
    with pytest.raises(ClaimRefusedError, match="attempt 2 is over"), monitor(place, 2):
        pass


def test_a_coordinator_has_no_directory_there(place: Place) -> None:
    with monitor(place, 0) as client, pytest.raises(UnsupportedPlaceError, match="no directory"):
        _ = coordinator(place, client).directory


def test_only_the_last_checkpoints_are_kept(place: Place) -> None:
    with monitor(place, 0, max_to_keep=2) as client:
        for step in (1, 2, 3, 4):
            save(place, client, step)
    assert commits.committed_steps(place.open(), CHECKPOINT) == [3, 4]
    folders = {re.search(r"objects/(global_step_\d+)", key) for key in place.objects()}
    assert {match[1] for match in folders if match} == {"global_step_3", "global_step_4"}


@pytest.mark.parametrize("fault", [Fault.LOST_REPLY, Fault.DONE_BUT_500])
@pytest.mark.parametrize(
    "pattern",
    [
        r"run/TERM\.json",
        "manifests/",
        "latest_",
        "receipts/",
        "REGISTRATION",
        "OUTCOME",
        "objects/",
    ],
)
def test_a_put_that_was_done_and_whose_reply_is_lost_counts(
    place: Place, fault: Fault, pattern: str
) -> None:
    with monitor(place, 0) as client:
        rule = place.proxy.break_next(fault, "PUT", pattern)
        save(place, client, 1)
        assert rule.left == 0
    assert findings("verify", place.url(), code=0) == []
    assert (place.files / "runs/a/latest_checkpointed_iteration.txt").read_text() == "1\n"


def test_a_put_of_a_manifest_that_arrives_after_retention_brings_no_step_back(
    place: Place,
) -> None:
    pattern = r"/manifests/checkpoint/global_step_1\.json"
    held = place.proxy.break_next(Fault.HELD, "PUT", pattern, after=1)  # the put before: its mark
    with monitor(place, 0) as client:
        save(place, client, 1)
    assert held.left == 0
    with monitor(place, 1, max_to_keep=1) as client:
        save(place, client, 2)
        eventually(lambda: commits.committed_steps(place.open(), CHECKPOINT) == [2])
        eventually(lambda: not [key for key in place.objects() if "global_step_1/" in key])
        held.released.set()
        eventually(lambda: held.late != [])
    assert held.late[0] in (404, 412)
    assert commits.committed_steps(place.open(), CHECKPOINT) == [2]
    assert findings("verify", place.url(), code=0) == []


def test_a_damaged_checkpoint_is_set_aside_for_the_one_before(place: Place) -> None:
    with monitor(place, 0) as client:
        save(place, client, 1)
        save(place, client, 2)
    stored = commits.read_manifest(place.open(), CHECKPOINT, 2)
    (place.files / "runs/a" / next(iter(stored.keys.values()))).write_bytes(b"short")
    with RunContext.from_env(place.url()) as ctx:
        resume = ctx.resume()
        assert resume is not None
        assert resume.step == 1
        saving = ctx.coordinator()
        saving.register(2, checkpoint_participants=all_ranks("model", world_size=1))
        saving.save_async("model", weights(2), 2)
        saving.finish(2, timeout=60)
    assert commits.committed_steps(place.open(), CHECKPOINT) == [1, 2]
    left = findings("verify", place.url(), code=0)
    assert {code for _, code, _ in left} <= {"unlisted"}, "the damaged one stays to be looked at"


@pytest.mark.parametrize(
    ("point", "is_complete"),
    [
        ("live.shard", False),
        ("live.receipt", True),
        ("store.reserved", True),
        ("live.term", True),
        ("live.intent", True),
        ("store.uploaded", True),
        ("store.manifest", True),
        ("store.pointer", True),
        ("live.outcome", True),
    ],
)
def test_a_process_that_is_killed_at_a_put_leaves_whole_commits_alone(
    place: Place, point: str, is_complete: bool
) -> None:
    """What was complete the next attempt commits before it begins; of the rest nothing is left."""
    run_killed("tests.store.processes.live_job", place.url(), point)
    left = {code for _, code, _ in findings("verify", place.url(), code=0)}
    assert left <= {"unlisted", "pointer_behind"}
    step = 2 if is_complete else 1
    with RunContext.from_env(place.url()) as ctx:
        resume = ctx.resume()
        assert resume is not None
        assert resume.step == step
        assert torch.equal(loaded(resume), weights(step)["weight"])
    assert commits.committed_steps(place.open(), CHECKPOINT) == [1, 2][:step]
    assert findings("verify", place.url(), code=0) == [], "what is orphaned was swept"
    assert (place.files / "runs/a/latest_checkpointed_iteration.txt").read_text() == f"{step}\n"
