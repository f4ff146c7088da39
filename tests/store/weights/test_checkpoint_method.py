"""Sync method ``checkpoint`` in a bucket: explorers read state dicts, on a real S3 server.

`test_store_method` has explorers in processes of their own, where a Ray cluster runs already.
"""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from trainsync import RunContext, WeightPublisher
from trainsync.agent.agent import Agent
from trainsync.agent.intervals import AgentIntervals
from trainsync.agent.settings import read_settings
from trainsync.api import env
from trainsync.api.protocol import SaveKind, SaveState
from trainsync.engines.module_engine import TrainedModule
from trainsync.runtime.relays.committed_weights import read_stored_weights
from trainsync.storage.objects import commits
from trainsync.storage.objects.bucket import ObjectBucket
from trainsync.storage.objects.manifests import Stored
from trainsync.weights.errors import DigestMismatchError, WeightsReplacedError
from trainsync.weights.proof.record import encode_proof
from trainsync.weights.transports.volume.stored import StoredStateDicts
from trainsync.weights.versions import CheckpointLocation, Published

from tests.store.conftest import Place
from tests.store.processes.store_trainer import model, train
from tests.store.servers.server import Server
from tests.unit.agent.admission.test_proving import proof_of
from tests.unit.agent.conftest import Watched, has
from tests.unit.agent.fake_server import FakeServer
from tests.unit.agent.runs import weights_of

pytestmark = pytest.mark.timeout(240)

STATE_DICT = SaveKind.STATE_DICT
READER = "AKIAREADERREADERDICT"
TO_READ = ("s3:GetObject", "s3:ListBucket")


def reading(server: Server, place: Place, user: str) -> dict[str, str]:
    """Credentials of a new user, which may only read there."""
    server.add_user(user, "readers-secret")
    statements = [
        {
            "Effect": "Allow",
            "Principal": {"AWS": [user]},
            "Action": [action],
            "Resource": f"arn:aws:s3:::{place.name}" + "/*" * (action == "s3:GetObject"),
        }
        for action in TO_READ
    ]
    server.set_policy(place.name, {"Version": "2012-10-17", "Statement": statements})
    return {"AWS_ACCESS_KEY_ID": user, "AWS_SECRET_ACCESS_KEY": "readers-secret"}


@pytest.fixture
def ctx(place: Place) -> Iterator[RunContext]:
    with RunContext.from_env(place.url(), environ=settings(place)) as made:
        made.resume()
        yield made


def settings(place: Place, **more: str) -> dict[str, str]:
    return {
        env.CHECKPOINT_DIR: place.url(),
        env.RUN_NAME: f"run-{place.name}",
        env.SYNC_METHOD: "checkpoint",
        env.SYNC_TIMEOUT_SECONDS: "60",
        **more,
    }


def publish(ctx: RunContext, step: int, made: torch.nn.Module, **given: Any) -> None:
    with WeightPublisher(ctx, TrainedModule(made), ctx.coordinator(0, 1)) as publisher:
        publisher.publish(step)
    assert ctx.monitor.save_status(STATE_DICT, step, 60).state is SaveState.COMMITTED


def announced(place: Place, step: int) -> Published:
    stored = commits.read_manifest(place.open(), STATE_DICT, step)
    manifest = stored.manifest
    where = CheckpointLocation(f"global_step_{step}", stored.digest, manifest.attempt, step)
    return Published.saved(step, stored.digest, manifest.bytes, where)


Read = Callable[..., Mapping[str, torch.Tensor]]


def source(place: Place, read: Read = read_stored_weights) -> StoredStateDicts:
    return StoredStateDicts(place.open(), read)


def same(found: Mapping[str, torch.Tensor], made: torch.nn.Module) -> bool:
    state = made.state_dict()
    return set(found) == set(state) and all(torch.equal(found[n], state[n]) for n in state)


def test_a_version_is_read_whole_and_a_damaged_or_superseded_one_is_refused(place: Place) -> None:
    made = model()
    with RunContext.from_env(place.url(), environ=settings(place)) as ctx:
        ctx.resume()
        publish(ctx, 1, made)
    first = announced(place, 1)
    weights = source(place).fetch(first, 60)
    assert same(weights.state_dict, made)
    assert weights.bytes == sum(t.nbytes for t in made.state_dict().values())
    (shard,) = place.files.glob("runs/a/objects/global_step_1/run-*/actor/model_*.pt")
    data = bytearray(shard.read_bytes())
    data[len(data) // 2] ^= 1
    shard.write_bytes(data)
    with pytest.raises(DigestMismatchError):
        source(place).fetch(first, 60)
    with RunContext.from_env(place.url(), environ=settings(place)) as newer:
        newer.resume()
        publish(newer, 1, made)
    with pytest.raises(WeightsReplacedError, match="by now, expected"):
        source(place).fetch(first, 60)
    assert same(source(place).fetch(announced(place, 1), 60).state_dict, made)
    for key in place.files.glob("runs/a/manifests/state_dict/*"):
        key.unlink()
    with pytest.raises(WeightsReplacedError, match="is gone"):
        source(place).fetch(first, 60)


def test_a_reader_keeps_its_version_while_newer_ones_supersede_it(place: Place) -> None:
    """Another attempt takes the place of its step, and retention of all before it."""
    made, again = model(), model()
    train(again, 1)
    keep = settings(place, **{env.CHECKPOINT_MAX_TO_KEEP: "1"})

    def late(
        bucket: ObjectBucket, stored: Stored, *, deadline: float
    ) -> Mapping[str, torch.Tensor]:
        """The reader is slow: the manifest is read, and the objects after all that."""
        with RunContext.from_env(place.url(), environ=keep) as newer:
            newer.resume()
            for step in (1, 2, 3):
                publish(newer, step, again)
            # Its answer to one more question comes after what it would remove.
            assert newer.monitor.save_status(STATE_DICT, 3, 0).state is SaveState.COMMITTED
        return read_stored_weights(bucket, stored, deadline=deadline)

    with RunContext.from_env(place.url(), environ=keep) as ctx:
        ctx.resume()
        publish(ctx, 1, made)
    assert same(source(place, late).fetch(announced(place, 1), 60).state_dict, made)
    assert same(source(place).fetch(announced(place, 3), 60).state_dict, again)


def test_a_servers_agent_follows_commits_with_the_right_to_read_alone(
    place: Place,
    server: Server,
    ctx: RunContext,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    saving = ctx.coordinator(0, 1)
    for name, value in reading(server, place, READER).items():
        monkeypatch.setenv(name, value)
    memory = tmp_path / "memory"
    memory.mkdir()
    vllm = FakeServer(memory)
    options = [f"--server={vllm.url}", f"--directory={place.url()}", "--port=0", "--proof=required"]
    given = read_settings([*options, f"--memory={memory}"], {})
    assert given.bucket == place.url()
    agent = Agent(given, None, AgentIntervals(cycle=0.05, feed=0.05, look=0.05, retry=0.1))
    try:
        watched = Watched(agent)
        for step in (1, 2):
            weights = weights_of(step)
            saving.register(step, state_dict_participants=[("model", 0)])
            proof = {"PROOF.json": encode_proof(proof_of(step))}
            saving.save_async("model", weights, step, True, attachments=proof)
            watched.until_ready_with(step)
            assert has(vllm, weights)
        assert watched.status["proof"]["verdict"] == "proven"
        assert watched.status["directory"] == place.url()
    finally:
        assert agent.close()
        vllm.stop()
