"""Calls from one cluster to the other, over HTTP."""

import threading

import pytest
from trainsync.api.protocol import SynchronizerAnswer, SynchronizerAnswers, SynchronizerCall
from trainsync.monitor.errors import FencedError
from trainsync.monitor.ledger.saves import SaveOwner

from tests.unit.monitor.fakes import FakeApi
from tests.unit.monitor.saves import FIRST
from tests.unit.monitor.server.clients import Clients

EXPLORERS = SaveOwner(0, "eeeeeeee0")
CALL = SynchronizerCall(id="0123456789ab", method="get_contact")


def test_a_call_of_one_cluster_is_answered_by_the_other(api: FakeApi, clients: Clients) -> None:
    there = [{"name": "main", "attempt": 0}, {"name": "explore", "attempt": 0}]
    api.run = {**api.run, "status": {"attempt": 0, "clusters": there}}
    trainer, explorer = clients(FIRST), clients(EXPLORERS)
    trainer.claim("main")
    explorer.claim("explore")

    def answer() -> None:
        found = trainer.synchronizer_calls("", 0, 20)
        assert found.calls == [CALL]
        said = SynchronizerAnswer(id=CALL.id, value={"namespace": None})
        trainer.answer_synchronizer(SynchronizerAnswers(answers=[said]))

    thread = threading.Thread(target=answer)
    thread.start()
    reply = explorer.call_synchronizer(CALL, 20)
    thread.join(20)
    assert (reply.done, reply.value) == (True, {"namespace": None})


def test_calls_are_for_those_alone_that_claimed_the_attempt(clients: Clients) -> None:
    trainer, stranger = clients(FIRST), clients(EXPLORERS)
    trainer.claim("main")
    with pytest.raises(FencedError):
        stranger.call_synchronizer(CALL)
    with pytest.raises(FencedError):
        stranger.synchronizer_calls("", 0)
    with pytest.raises(FencedError):
        stranger.answer_synchronizer(SynchronizerAnswers(answers=[]))
    assert trainer.synchronizer_calls("", 0).calls == []
