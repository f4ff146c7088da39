"""Claims through the service, and the fencing of older attempts."""

import threading
import time
from pathlib import Path

import pytest
from trainsync.api.protocol import SaveState
from trainsync.kube.client import KubeError
from trainsync.monitor import errors
from trainsync.monitor.ledger.saves import SaveOwner
from trainsync.storage.saves.incarnations import successor

from tests.unit.monitor.fakes import FakeApi, Signer
from tests.unit.monitor.saves import CHECKPOINT, FIRST, SECOND, request, write_all
from tests.unit.monitor.server.clients import PATIENT, Clients


def test_an_entrypoint_that_starts_twice_is_refused(clients: Clients) -> None:
    clients().claim("main")
    clients().claim("main")  # the same incarnation asks again: its answer was lost
    second = clients(SaveOwner(0, "zzzzzzzz"))
    with pytest.raises(errors.ClaimRefusedError, match="runs once per attempt"):
        second.claim("main")
    with pytest.raises(errors.FencedError):
        second.resume()


def test_a_newer_attempt_fences_the_older(clients: Clients, api: FakeApi) -> None:
    first, second = clients(), clients(SECOND)
    first.claim("main")
    with pytest.raises(errors.NotYetError):
        second.claim("main")
    api.set_status(attempt=1, generation=0)
    second.claim("main")
    with pytest.raises(errors.FencedError, match="the run is at attempt 1"):
        first.register(request(10))
    with pytest.raises(errors.ClaimRefusedError):
        first.claim("main")


def test_a_claim_waits_until_the_run_has_come_to_its_attempt(
    clients: Clients, api: FakeApi
) -> None:
    client = clients(SECOND, PATIENT)
    claimed = threading.Thread(target=client.claim, args=["main"])
    claimed.start()
    time.sleep(0.2)
    assert claimed.is_alive()
    api.set_status(attempt=1, generation=0)
    claimed.join(30)
    assert not claimed.is_alive()
    assert client.resume() is None


def test_a_claim_needs_the_token_of_the_clusters_present_pods(
    clients: Clients, api: FakeApi, token_file: Path, signer: Signer
) -> None:
    api.set_status(attempt=1, generation=1)
    with pytest.raises(errors.ForbiddenError, match="replaced"):
        clients(SECOND).claim("main")
    token_file.write_text(signer.token(generation=1))
    with pytest.raises(errors.NotYetError, match="'other'"):
        clients(SECOND).claim("other")
    clients(SECOND).claim("main")


def test_no_claim_is_granted_while_the_api_server_is_away(clients: Clients, api: FakeApi) -> None:
    first = clients()
    first.claim("main")
    api.fail = KubeError(None, "connection refused")
    with pytest.raises(errors.NotReadyError):
        clients(SECOND).claim("main")
    assert first.resume() is None  # those in force go on


def test_a_restart_in_place_fences_the_predecessor_and_its_lost_answer_is_given_again(
    clients: Clients, volume: Path
) -> None:
    first = clients()
    first.claim("main")
    first.register(request(10))
    write_all(volume, FIRST, 10)
    name = successor(FIRST.incarnation)
    client = first.renew(name, "rank 1 died")
    again = first.renew(name, "rank 1 died")  # the answer was lost
    for renewed in (client, again):
        point = renewed.resume()
        assert point is not None
        assert (renewed.incarnation, point.step) == (name, 10)
        renewed.close()
    with pytest.raises(errors.FencedError):
        first.register(request(20))
    with pytest.raises(errors.FencedError):
        first.renew(successor(FIRST.incarnation), "another driver")


def test_what_the_spec_asks_for_right_before_a_claim_holds_for_it(
    clients: Clients, api: FakeApi, volume: Path
) -> None:
    first, second = clients(), clients(SECOND)
    first.claim("main")
    for step in (10, 20):
        first.register(request(step))
        write_all(volume, FIRST, step)
        status = first.save_status(CHECKPOINT, step, wait_seconds=20)
        assert status.state is SaveState.COMMITTED
    api.set_status(attempt=1, generation=0)
    api.run["spec"] = {"resumeFrom": {"step": 10}}
    second.claim("main")
    point = second.resume()
    assert point is not None
    assert point.step == 10
