"""A fetch ends when its time is over, whatever a real S3 server does meanwhile."""

import time

import pytest
import torch
from trainsync import RunContext
from trainsync.api.protocol import SaveKind
from trainsync.runtime.relays.committed_weights import read_stored_weights
from trainsync.storage.objects import commits
from trainsync.storage.objects.bucket import Limits
from trainsync.weights.delta.compiling import prepare
from trainsync.weights.errors import WeightsUnavailableError
from trainsync.weights.proof.record import encode_proof
from trainsync.weights.transports.anchors.index import Owner
from trainsync.weights.transports.anchors.publisher import AnchorPublisher
from trainsync.weights.transports.anchors.reader import AnchorReader
from trainsync.weights.transports.volume.stored import StoredStateDicts
from trainsync.weights.versions import CheckpointLocation, Published

from tests.store.conftest import Place
from tests.store.servers.fault_proxy import Fault
from tests.store.weights.test_checkpoint_method import model, publish, settings
from tests.unit.agent.admission.test_proving import proof_of

pytestmark = pytest.mark.timeout(240)

TIMEOUT = 3.0
HANGS = 60.0
LATEST = 30.0
"""Half of what the server takes: Python may come late to what it waits for."""
STATE_DICT = SaveKind.STATE_DICT


@pytest.mark.parametrize("what", ["manifests/state_dict", r"/objects/.*model_.*\.pt"])
def test_committed_weights(place: Place, what: str) -> None:
    with RunContext.from_env(place.url(), environ=settings(place)) as ctx:
        ctx.resume()
        publish(ctx, 1, model())
    stored = commits.read_manifest(place.open(), STATE_DICT, 1)
    where = CheckpointLocation("global_step_1", stored.digest, stored.manifest.attempt, 1)
    published = Published.saved(1, stored.digest, stored.manifest.bytes, where)
    source = StoredStateDicts(place.open(limits=Limits()), read_stored_weights)
    hanging = place.proxy.break_next(Fault.DELAYED, "GET", what, 10_000, seconds=HANGS)
    began = time.monotonic()
    with pytest.raises(WeightsUnavailableError, match="in time"):
        source.fetch(published, TIMEOUT)
    assert time.monotonic() - began < LATEST
    assert hanging.left < 10_000
    hanging.left = 0
    assert source.fetch(published, 60.0).version == 1


@pytest.mark.parametrize("what", ["INDEX", r"\.anchor", r"\.proof"])
def test_versions_of_a_store(place: Place, what: str) -> None:
    assert prepare(600.0, compact=True)
    trainer = AnchorPublisher(place.open(endpoint=place.direct), Owner("run-uid", 1, "aaaa0000"))
    proof = encode_proof(proof_of(1))
    trainer.publish(1, lambda: [("w", torch.ones(300))], 60.0, proof=proof)
    reader = AnchorReader(place.open(limits=Limits()))
    newest = reader.newest()
    assert newest is not None
    hanging = place.proxy.break_next(Fault.DELAYED, "GET", what, 10_000, seconds=HANGS)
    ask = reader.proof if what == r"\.proof" else reader.fetch
    began = time.monotonic()
    with pytest.raises(WeightsUnavailableError, match="in time"):
        ask(1, newest.digest, TIMEOUT)
    assert time.monotonic() - began < LATEST
    assert hanging.left < 10_000
    hanging.left = 0
    assert reader.fetch(1, newest.digest, 60.0).version == 1
    assert reader.proof(1, newest.digest, 60.0) == proof
    trainer.close()
    reader.close()
