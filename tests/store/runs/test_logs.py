"""What a run in a bucket logs and raises has none of its keys, whatever the bucket answers."""

import logging
import secrets

import pytest
import torch
from trainsync.checkpoint.coordinator import CheckpointCoordinator
from trainsync.checkpoint.errors import SaveAbortedError, SaveFailedError
from trainsync.checkpoint.save.registration import all_ranks
from trainsync.monitor.client.store import StoreMonitorClient
from trainsync.monitor.core.core import CoreSettings
from trainsync.storage.objects.errors import StoreUnavailableError

from tests.store.conftest import Place
from tests.store.servers.fault_proxy import Fault
from tests.store.servers.server import ACCESS, SECRET

WORD = "The proxy says so."
"""Of the body that the fault proxy answers, which quotes the key's id, too."""


@pytest.mark.parametrize(
    ("status", "code"), [(503, "SlowDown"), (403, "AccessDenied"), (403, "SignatureDoesNotMatch")]
)
def test_no_line_and_no_error_has_a_key(
    place: Place, caplog: pytest.LogCaptureFixture, status: int, code: str
) -> None:
    caplog.set_level(logging.DEBUG)
    client = StoreMonitorClient(
        place.open(),
        attempt=0,
        incarnation=secrets.token_hex(8),
        settings=CoreSettings(),
        tick_seconds=0.1,
        timeout_seconds=60,
    )
    client.claim("local")
    saving = CheckpointCoordinator(client, place.url())
    saving.register(1, checkpoint_participants=all_ranks("model", world_size=1))
    left = 8 if status == 503 else 1000  # of obstore's seven tries nothing is said
    rules = [
        place.proxy.break_next(Fault.REFUSED, method, "/objects/", left, status=status, code=code)
        for method in ("PUT", "POST")
    ]
    saving.save_async("model", {"weight": torch.arange(1000)}, 1)
    said = ""
    try:
        saving.finish(1, timeout=60)
    except (SaveFailedError, SaveAbortedError, StoreUnavailableError) as error:
        said = repr(error) + str(error.__cause__)
        assert status == 403, said
    assert sum(left - rule.left for rule in rules), "the bucket has refused"
    saving.saves.close(20.0)
    client.close()
    text = caplog.text + said
    assert code in text, "the refusal is told of"
    for secret in (SECRET, ACCESS, WORD, "Signature=", "AWS4-HMAC"):
        assert secret not in text
