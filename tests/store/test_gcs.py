"""A run, and lost replies, in a bucket of GCS (fake-gcs-server)."""

import pytest
import torch
from trainsync import RunContext
from trainsync.api import env
from trainsync.api.protocol import SaveKind
from trainsync.checkpoint.load.loading import load_shard
from trainsync.checkpoint.save.registration import all_ranks
from trainsync.storage.objects import commits
from trainsync.storage.objects.of_run import open_run_store
from trainsync.storage.objects.opening import StoreOptions, open_store

from tests.store.conftest import FAST
from tests.store.servers import gcs
from tests.store.servers.fault_proxy import Fault, FaultProxy
from tests.store.servers.gcs import Gcs
from tests.unit.cli.commands import document, findings

LARGE = 2 << 20
"""Numbers of a shard that goes in three parts: 16 MiB, and what torch adds."""
BLOCK = b"x" * (6 << 20)


def test_a_run_in_gcs_goes_on_from_its_bucket(
    gcs_bucket: str, google: Gcs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a pod: the run's key comes by our variables, and those of the training are wrong."""
    url = f"{gcs_bucket}/runs/a"
    with monkeypatch.context() as pod:
        pod.setenv(
            f"{env.STORE_CREDENTIAL_PREFIX}GOOGLE_SERVICE_ACCOUNT_KEY", gcs.account(google.endpoint)
        )
        pod.setenv(env.STORE_ALLOW_HTTP, "true")
        pod.delenv("AWS_ALLOW_HTTP")
        pod.setenv("GOOGLE_SERVICE_ACCOUNT_KEY", "of-the-trainings-data")
        with RunContext.from_env(url) as ctx:
            saving = ctx.coordinator()
            for step, size in ((1, 1000), (2, LARGE)):
                whole = all_ranks("model", world_size=1)
                saving.register(step, checkpoint_participants=whole, state_dict_participants=whole)
                weights = {"weight": torch.arange(size) + step}
                saving.save_async("model", weights, step)
                saving.save_async("model", weights, step, is_state_dict=True)
                assert saving.finish(step, timeout=60) is not None
        with RunContext.from_env(url) as ctx:
            assert ctx.attempt == 1
            resume = ctx.resume()
            assert resume is not None
            assert resume.step == 2
            state = load_shard(resume, "actor/model_world_size_1_rank_0.pt")
            assert torch.equal(state["weight"], torch.arange(LARGE) + 2)
        assert commits.read_pointer(open_run_store(url), SaveKind.CHECKPOINT) == 2
    kinds = {(save["step"], save["kind"]) for save in document("ls", url)["saves"]}
    assert kinds == {(step, kind) for step in (1, 2) for kind in ("checkpoint", "state_dict")}
    assert findings("verify", url, code=0) == []


@pytest.mark.parametrize("fault", [Fault.LOST_REPLY, Fault.DONE_BUT_500])
def test_a_put_into_gcs_that_was_done_and_whose_reply_is_lost_counts(
    gcs_bucket: str, google: Gcs, monkeypatch: pytest.MonkeyPatch, fault: Fault
) -> None:
    with FaultProxy(google.port).running() as proxy:
        monkeypatch.setenv("GOOGLE_SERVICE_ACCOUNT_KEY", gcs.account(proxy.endpoint))
        bucket = open_store(gcs_bucket, StoreOptions(limits=FAST))
        for step in (1, 2):  # the first makes the pointer, the second replaces it
            rule = proxy.break_next(fault, "PUT", "latest")
            assert commits.move_pointer(bucket, SaveKind.CHECKPOINT, step)
            assert rule.left == 0
            assert commits.read_pointer(bucket, SaveKind.CHECKPOINT) == step
        rule = proxy.break_next(fault, "POST", "uploadId=")
        bucket.upload("large", iter([BLOCK] * 2), 2 * len(BLOCK))
        assert rule.left == 0
        assert bucket.size("large") == 2 * len(BLOCK)


def test_gcs_that_takes_one_put_a_second_of_an_object_is_asked_again(
    gcs_bucket: str, google: Gcs, monkeypatch: pytest.MonkeyPatch
) -> None:
    with FaultProxy(google.port).running() as proxy:
        monkeypatch.setenv("GOOGLE_SERVICE_ACCOUNT_KEY", gcs.account(proxy.endpoint))
        bucket = open_store(gcs_bucket, StoreOptions(limits=FAST))
        for step in (1, 2):
            rule = proxy.break_next(
                Fault.REFUSED, "PUT", "latest", left=2, status=429, code="SlowDown"
            )
            assert commits.move_pointer(bucket, SaveKind.CHECKPOINT, step)
            assert rule.left == 0
