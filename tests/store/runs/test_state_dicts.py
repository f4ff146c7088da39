"""State dicts of a run in a bucket, on a real S3 server, with monitors that are killed."""

import pytest
import torch
from trainsync import RunContext, all_ranks
from trainsync.api.protocol import SaveKind, SaveState
from trainsync.storage.objects import commits
from trainsync.storage.objects.live import references

from tests.store.conftest import Place
from tests.store.processes.forked import run_killed
from tests.store.servers.fault_proxy import Fault
from tests.unit.cli.commands import findings

CHECKPOINT, STATE_DICT = SaveKind.CHECKPOINT, SaveKind.STATE_DICT
POINTER = "runs/a/latest_state_dict_iteration.txt"


def publish(ctx: RunContext, step: int, value: float) -> None:
    saving = ctx.coordinator(0, 1)
    saving.register(step, state_dict_participants=all_ranks("model", world_size=1))
    saving.save_async("model", {"weight": torch.full((1000,), value)}, step, is_state_dict=True)
    saving.wait_all(60)
    assert ctx.monitor.save_status(STATE_DICT, step, 30).state is SaveState.COMMITTED


@pytest.mark.parametrize(
    "points",
    [["store.manifest"], ["store.manifest", "store.manifest"]],
    ids=["new", "superseding"],
)
def test_a_monitor_that_is_killed_amid_a_version_leaves_it_whole_to_the_next(
    place: Place, points: list[str]
) -> None:
    """Between manifest and pointer, say; also where it supersedes an older attempt's version."""
    for point in points:
        run_killed("tests.store.processes.dict_job", place.url(), point)
    assert (place.files / POINTER).read_text() == "1\n" or len(points) > 1
    with RunContext.from_env(place.url()) as ctx:
        resume = ctx.resume()
        assert resume is not None
        assert resume.step == 1
        bucket = place.open()
        stored = commits.read_manifest(bucket, STATE_DICT, 2)
        assert stored.manifest.attempt == len(points) - 1
        assert (place.files / POINTER).read_text() == "2\n"
        publish(ctx, 2, 3.0)
        publish(ctx, 3, 3.0)
        assert commits.read_manifest(bucket, STATE_DICT, 2).manifest.attempt == len(points)
    assert commits.committed_pairs(bucket) == [
        (1, CHECKPOINT),
        *((s, STATE_DICT) for s in (1, 2, 3)),
    ]
    left = {code for _, code, _ in findings("verify", place.url(), code=0)}
    assert left <= {"unlisted"}, "what was superseded waits for its readers"
    with RunContext.from_env(place.url()):
        pass  # the next attempt sweeps
    assert references.named(bucket) == {info.key for info in bucket.below("objects")}
    assert findings("verify", place.url(), code=0) == []


def test_a_put_of_a_superseding_version_whose_reply_is_lost_counts(place: Place) -> None:
    with RunContext.from_env(place.url()) as ctx:
        publish(ctx, 2, 1.0)
    with RunContext.from_env(place.url()) as ctx:
        rule = place.proxy.break_next(Fault.LOST_REPLY, "PUT", "manifests/state_dict")
        publish(ctx, 2, 2.0)
        publish(ctx, 3, 2.0)
        assert rule.left == 0
    assert commits.read_manifest(place.open(), STATE_DICT, 2).manifest.attempt == 1
    assert (place.files / POINTER).read_text() == "3\n"
