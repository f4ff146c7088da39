"""A server prepares a version while it serves, or the update does without."""

import json
from typing import Any

import httpx
import pytest
from trainsync.engines.servers.errors import KEPT, UpdateRefusedError
from trainsync.engines.servers.preparing import (
    ABANDON,
    PREPARE,
    PREPARED,
    PreparationOutcome,
    told,
)
from trainsync.engines.servers.vllm import VLLMServer
from trainsync.weights.staging.index import StagedReference

_STAGED = StagedReference("trainsync-weights-0-0123456789abcdef/1.json", "sha256:" + "0" * 64)
_DONE = told(PreparationOutcome.PREPARED)


class Workers(httpx.BaseTransport):
    """Two workers of ``vllm serve``, and their answers in order: the last one again and again."""

    def __init__(self, *answers: list[Any]) -> None:
        self._answers = list(answers)
        self.calls: list[str] = []
        self.arguments: dict[str, Any] = {}
        self.refuses = False

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        body = json.loads(request.content)
        if request.url.path == "/init_weight_transfer_engine":
            assert body == {"init_info": _STAGED.as_dict()}
            self.calls.append("init")
            if self.refuses:
                return httpx.Response(500, json={"error": {"message": f"{KEPT}: other model"}})
            return httpx.Response(200, json={"message": "done"})
        assert request.url.path == "/collective_rpc"
        self.calls.append(body["method"])
        self.arguments |= body["kwargs"]
        if not self._answers:
            return httpx.Response(500, json={"error": {"message": "no such method"}})
        answer = self._answers.pop(0) if len(self._answers) > 1 else self._answers[0]
        return httpx.Response(200, json={"results": answer})


def _server(workers: Workers) -> VLLMServer:
    return VLLMServer("http://server:8000", timeout=100, transport=workers)


def test_a_version_is_prepared_once_all_workers_have_it() -> None:
    workers = Workers([told(None), told(None)], [_DONE, told(None)], [_DONE, _DONE])
    asked: list[int] = []
    with _server(workers) as server:
        ended = server.prepare(60, 7, _STAGED, lambda: asked.append(1))
    assert ended.outcome is PreparationOutcome.PREPARED
    assert ended.seconds > 0
    assert workers.calls == ["init", PREPARE, PREPARED, PREPARED]
    assert workers.arguments == {"seconds": 160}  # kept for the update, too
    assert len(asked) == 2


def test_a_worker_that_cannot_tells_why() -> None:
    workers = Workers([told(None), told(PreparationOutcome.NO_MEMORY, "full")])
    with _server(workers) as server:
        ended = server.prepare(60, 7, _STAGED, lambda: None)
    assert (ended.outcome, ended.reason) == (PreparationOutcome.NO_MEMORY, "full")


def test_a_preparation_that_takes_longer_is_given_up() -> None:
    workers = Workers([told(None)])
    with _server(workers) as server:
        ended = server.prepare(0.1, 7, _STAGED, lambda: None)
    assert (ended.outcome, ended.reason) == (PreparationOutcome.LATE, "it took longer than 0.1 s")
    assert workers.calls[-1] == ABANDON


@pytest.mark.parametrize("answer", [(), ([],), (["done"],)])
def test_a_server_that_knows_no_preparation_is_updated_without(answer: tuple[Any, ...]) -> None:
    with _server(Workers(*answer)) as server:
        ended = server.prepare(60, 7, _STAGED, lambda: None)
    assert ended.outcome is PreparationOutcome.IMPOSSIBLE
    assert "http://server:8000" in ended.reason


def test_a_version_that_is_superseded_is_given_up() -> None:
    class NewerError(Exception):
        pass

    def newer() -> None:
        raise NewerError

    workers = Workers([told(None)])
    with _server(workers) as server, pytest.raises(NewerError):
        server.prepare(60, 7, _STAGED, newer)
    assert workers.calls == ["init", PREPARE, ABANDON]


def test_a_version_that_cannot_be_loaded_is_refused() -> None:
    workers = Workers([_DONE])
    workers.refuses = True
    with _server(workers) as server, pytest.raises(UpdateRefusedError, match="other model"):
        server.prepare(60, 7, _STAGED, lambda: None)
    assert workers.calls == ["init"]
