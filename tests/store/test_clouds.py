"""A run, and lost replies, in a bucket of GCS (fake-gcs-server) and a container of Azure
(azurite)."""

from collections.abc import Callable
from dataclasses import dataclass

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
from tests.store.servers.azurite import ACCOUNT, KEY, Azurite
from tests.store.servers.fault_proxy import Fault, FaultProxy
from tests.store.servers.gcs import Gcs
from tests.unit.cli.commands import document, findings

LARGE = 2 << 20
"""Numbers of a shard that goes in three parts: 16 MiB, and what torch adds."""
BLOCK = b"x" * (6 << 20)


@dataclass(frozen=True)
class Cloud:
    """A new bucket or container ``url`` of the server at ``port``.

    Attributes:
        keys: of the run's Secret, for an endpoint.
        last_put: method, path and query of what makes an object of several parts.
        point_at: has commands of this process ask another endpoint of that server.
    """

    url: str
    port: int
    endpoint: str
    keys: Callable[[str], dict[str, str]]
    last_put: tuple[str, str]
    point_at: Callable[[str], None]


@pytest.fixture(params=["gcs", "azure"])
def cloud(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Cloud:
    if request.param == "gcs":
        url = request.getfixturevalue("gcs_bucket")
        google: Gcs = request.getfixturevalue("google")
        name = "GOOGLE_SERVICE_ACCOUNT_KEY"
        return Cloud(
            url,
            google.port,
            "",
            lambda endpoint: {name: gcs.account(endpoint or google.endpoint)},
            ("POST", "uploadId="),
            lambda endpoint: monkeypatch.setenv(name, gcs.account(endpoint)),
        )
    url = request.getfixturevalue("container")
    azure: Azurite = request.getfixturevalue("azure")
    keys = {"AZURE_STORAGE_ACCOUNT_NAME": ACCOUNT, "AZURE_STORAGE_ACCOUNT_KEY": KEY}
    return Cloud(
        url,
        azure.port,
        azure.endpoint,
        lambda _: keys,
        ("PUT", "comp=blocklist"),
        lambda endpoint: monkeypatch.setenv("AZURE_STORAGE_ENDPOINT", f"{endpoint}/{ACCOUNT}"),
    )


def test_a_run_goes_on_from_its_bucket(cloud: Cloud, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a pod: the run's key comes by our variables, and those of the training are wrong."""
    url = f"{cloud.url}/runs/a"
    with monkeypatch.context() as pod:
        for name, value in cloud.keys(cloud.endpoint).items():
            pod.setenv(f"{env.STORE_CREDENTIAL_PREFIX}{name}", value)
            pod.setenv(name, "of-the-trainings-data")
        pod.setenv(env.STORE_ALLOW_HTTP, "true")
        pod.delenv("AWS_ALLOW_HTTP")
        if cloud.endpoint:
            pod.setenv(env.STORE_ENDPOINT, cloud.endpoint)
            pod.setenv("AZURE_STORAGE_ENDPOINT", "http://127.0.0.1:1")
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
def test_a_put_that_was_done_and_whose_reply_is_lost_counts(cloud: Cloud, fault: Fault) -> None:
    with FaultProxy(cloud.port).running() as proxy:
        cloud.point_at(proxy.endpoint)
        bucket = open_store(cloud.url, StoreOptions(limits=FAST))
        for step in (1, 2):  # the first makes the pointer, the second replaces it
            rule = proxy.break_next(fault, "PUT", "latest")
            assert commits.move_pointer(bucket, SaveKind.CHECKPOINT, step)
            assert rule.left == 0
            assert commits.read_pointer(bucket, SaveKind.CHECKPOINT) == step
        rule = proxy.break_next(fault, *cloud.last_put)
        bucket.upload("large", iter([BLOCK] * 2), 2 * len(BLOCK))
        assert rule.left == 0
        assert bucket.size("large") == 2 * len(BLOCK)


def test_a_store_that_takes_one_put_a_second_of_an_object_is_asked_again(cloud: Cloud) -> None:
    """GCS does so."""
    with FaultProxy(cloud.port).running() as proxy:
        cloud.point_at(proxy.endpoint)
        bucket = open_store(cloud.url, StoreOptions(limits=FAST))
        for step in (1, 2):
            rule = proxy.break_next(
                Fault.REFUSED, "PUT", "latest", left=2, status=429, code="SlowDown"
            )
            assert commits.move_pointer(bucket, SaveKind.CHECKPOINT, step)
            assert rule.left == 0
