"""After each update a server serves one version, or is known not to serve."""

import json
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import httpx
import pytest
from trainsync.engines.servers.errors import (
    KEPT,
    TORN,
    ServerError,
    ServerPausedError,
    UpdateRefusedError,
)
from trainsync.engines.servers.vllm import VLLMServer
from trainsync.weights.staging.index import StagedReference

_STAGED = StagedReference("trainsync-weights-0-0123456789abcdef/1.json", "sha256:" + "0" * 64)
_UPDATE = [
    "init_weight_transfer_engine",
    "is_paused",
    "pause",
    "start_weight_update",
    "update_weights",
    "reset_prefix_cache",
    "finish_weight_update",
    "weight_info",
    "resume",
]

Answer = Callable[[httpx.Request], httpx.Response]


class FakeServer(httpx.BaseTransport):
    """The endpoints of ``vllm serve`` that the driver calls, and answers to give in their stead."""

    def __init__(self, staged: StagedReference = _STAGED, **instead: Answer) -> None:
        self.staged = staged
        self.calls: list[str] = []
        self.paused = False
        self.version = "default"
        self.instead = instead

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        name = request.url.path.removeprefix("/")
        self.calls.append(name)
        if name in self.instead:
            return self.instead[name](request)
        return httpx.Response(200, json=self._answer(name, request))

    def _answer(self, name: str, request: httpx.Request) -> dict[str, Any]:
        body = json.loads(request.content or b"null")
        match name:
            case "pause":
                assert request.url.params["mode"] == "keep"
                self.paused = True
            case "resume":
                self.paused = False
            case "is_paused":
                return {"is_paused": self.paused}
            case "weight_info":
                return {"weight_version": self.version}
            case "init_weight_transfer_engine":
                assert body == {"init_info": self.staged.as_dict()}
            case "update_weights":
                assert body == {"update_info": self.staged.as_dict()}
            case "finish_weight_update":
                self.version = body["weight_version"]
            case "reset_prefix_cache":
                return {"success": True}
            case "weight_checker":
                return {"checksums": {"weight": "0"}}
        return {"message": "done"}


def _error(message: str, status: int = 500) -> Answer:
    return lambda request: httpx.Response(status, json={"error": {"message": message}})


def _late(request: httpx.Request) -> httpx.Response:
    raise httpx.ReadTimeout("late", request=request)


def _broken(request: httpx.Request) -> httpx.Response:
    raise httpx.ConnectError("refused", request=request)


def _page(request: httpx.Request) -> httpx.Response:
    return httpx.Response(200, html="<h1>of a proxy</h1>")


def _list(request: httpx.Request) -> httpx.Response:
    return httpx.Response(200, json=[])


_BAD = [_error("failed"), _late, _broken, _page, _list]


def _server(fake: FakeServer) -> VLLMServer:
    return VLLMServer("http://server:8000", transport=fake)


def test_an_update_pauses_replaces_names_and_resumes() -> None:
    fake = FakeServer()
    with _server(fake) as server:
        assert server.version() is None
        fake.calls.clear()
        assert server.update(7, _STAGED).version == 7
        assert fake.calls == _UPDATE
        assert server.version() == 7
        assert not server.is_paused()
        assert server.checksums() == {"weight": "0"}


def test_a_version_with_a_draft_model_comes_in_one_update_of_vllms_for_drafts() -> None:
    staged = replace(_STAGED, draft=True)
    fake = FakeServer(staged)
    with _server(fake) as server:
        assert server.update(7, staged).version == 7
    draft = "start_draft_weight_update"
    assert fake.calls == [draft if call == "start_weight_update" else call for call in _UPDATE]


def test_a_server_that_has_no_draft_model_is_resumed() -> None:
    staged = replace(_STAGED, draft=True)
    fake = FakeServer(staged, start_draft_weight_update=_error("no draft model is configured"))
    with _server(fake) as server, pytest.raises(UpdateRefusedError, match="no draft model"):
        server.update(7, staged)
    assert fake.calls[-1] == "resume"
    assert "update_weights" not in fake.calls


@pytest.mark.parametrize("bad", _BAD)
@pytest.mark.parametrize("call", ["init_weight_transfer_engine", "is_paused"])
def test_a_version_that_is_refused_before_the_pause_pauses_nothing(call: str, bad: Answer) -> None:
    fake = FakeServer(**{call: bad})
    with _server(fake) as server, pytest.raises(UpdateRefusedError, match="version 7: http"):
        server.update(7, _STAGED)
    assert "pause" not in fake.calls


@pytest.mark.parametrize("bad", _BAD)
@pytest.mark.parametrize("call", ["pause", "start_weight_update"])
def test_a_server_that_has_loaded_nothing_is_resumed(call: str, bad: Answer) -> None:
    fake = FakeServer(**{call: bad})
    with _server(fake) as server, pytest.raises(UpdateRefusedError, match="version 7: "):
        server.update(7, _STAGED)
    assert fake.calls[-1] == "resume"
    assert "update_weights" not in fake.calls


def test_a_server_whose_engine_kept_its_weights_is_resumed() -> None:
    fake = FakeServer(update_weights=_error(f"Call failed: {KEPT}: other version"))
    with _server(fake) as server, pytest.raises(UpdateRefusedError, match="other version"):
        server.update(7, _STAGED)
    assert not fake.paused


@pytest.mark.parametrize("bad", [*_BAD, _error(f"Call failed: {TORN}: disk on fire")])
@pytest.mark.parametrize(
    "call", ["update_weights", "reset_prefix_cache", "finish_weight_update", "weight_info"]
)
def test_a_server_that_may_be_torn_stays_paused(call: str, bad: Answer) -> None:
    fake = FakeServer(**{call: bad})
    with _server(fake) as server, pytest.raises(ServerPausedError, match="is left paused"):
        server.update(7, _STAGED)
    assert fake.paused
    assert "resume" not in fake.calls


def test_a_torn_server_serves_after_an_update_that_succeeds() -> None:
    fake = FakeServer(update_weights=_late)
    with _server(fake) as server:
        with pytest.raises(ServerPausedError):
            server.update(7, _STAGED)
        del fake.instead["update_weights"]
        fake.instead["start_weight_update"] = _error("a weight update is already active")
        assert server.update(7, _STAGED).version == 7
        assert not fake.paused


def test_a_paused_server_whose_weights_were_kept_stays_paused() -> None:
    fake = FakeServer(update_weights=_error(KEPT))
    fake.paused = True  # by a driver that died, and that may have left anything
    with _server(fake) as server, pytest.raises(ServerPausedError):
        server.update(7, _STAGED)
    assert fake.paused


@pytest.mark.parametrize("bad", _BAD)
def test_a_server_that_does_not_resume_is_reported(bad: Answer) -> None:
    fake = FakeServer(resume=bad)
    with _server(fake) as server, pytest.raises(ServerPausedError, match="did not resume"):
        server.update(7, _STAGED)
    fake = FakeServer(resume=bad, start_weight_update=_error("failed first"))
    with _server(fake) as server, pytest.raises(ServerPausedError, match=r"failed first.*did not"):
        server.update(7, _STAGED)


def test_a_server_that_kept_its_prefix_cache_does_not_serve() -> None:
    fake = FakeServer(reset_prefix_cache=lambda _: httpx.Response(200, json={"success": False}))
    with _server(fake) as server, pytest.raises(ServerPausedError, match="prefix cache"):
        server.update(7, _STAGED)


def test_a_server_that_names_another_version_does_not_serve() -> None:
    fake = FakeServer(weight_info=lambda _: httpx.Response(200, json={"weight_version": "6"}))
    with _server(fake) as server, pytest.raises(ServerPausedError, match="has version 6, not 7"):
        server.update(7, _STAGED)


@pytest.mark.parametrize("answer", [{}, {"weight_version": 7}, {"checksums": {}}])
def test_an_answer_of_another_kind_is_an_error(answer: dict[str, Any]) -> None:
    def strange(request: httpx.Request) -> httpx.Response:
        return httpx.Response(200, json=answer)

    fake = FakeServer(weight_info=strange, is_paused=strange, weight_checker=strange)
    with _server(fake) as server:
        for call in (server.version, server.is_paused, server.checksums):
            with pytest.raises(ServerError, match="http://server:8000"):
                call()


def test_an_answer_that_never_ends_has_a_deadline() -> None:
    class Endless(httpx.SyncByteStream):
        def __iter__(self) -> Any:
            while True:
                time.sleep(0.01)
                yield b" "

    fake = FakeServer(weight_info=lambda _: httpx.Response(200, stream=Endless()))
    server = VLLMServer("http://server:8000", timeout=0.1, transport=fake)
    with pytest.raises(ServerError, match="did not answer within"):
        server.version()
    server.close()


def test_an_update_has_one_deadline_for_all_its_calls() -> None:
    def slow(request: httpx.Request) -> httpx.Response:
        time.sleep(0.2)
        return httpx.Response(200, json={})

    fake = FakeServer(pause=slow)
    server = VLLMServer("http://server:8000", timeout=0.1, transport=fake)
    with pytest.raises(UpdateRefusedError, match="did not answer within"):
        server.update(7, _STAGED)
    assert not fake.paused
    server.close()


def _completions(request: httpx.Request) -> httpx.Response:
    """Of each token its id, as a log-probability; choices in another order."""
    body = json.loads(request.content)
    assert body["prompt_logprobs"] == 0
    choices = [
        {
            "index": index,
            "prompt_logprobs": [None, *({str(t): {"logprob": -t / 2}} for t in prompt[1:])],
        }
        for index, prompt in enumerate(body["prompt"])
    ]
    return httpx.Response(200, json={"choices": choices[::-1]})


def test_log_probabilities_are_those_of_the_prompts_tokens_in_order() -> None:
    fake = FakeServer(**{"v1/completions": _completions})
    prompts = [[1, 2 + number, 3] for number in range(40)]
    with _server(fake) as server:
        said = server.logprobs(prompts)
    assert said == tuple((-(2 + number) / 2, -1.5) for number in range(40))
    assert len(fake.calls) == 3


def _choices(*choices: Any) -> Answer:
    return lambda request: httpx.Response(200, json={"choices": list(choices)})


@pytest.mark.parametrize(
    "bad",
    [
        *_BAD,
        _choices(),
        _choices({"index": 0}),
        _choices({"index": 0, "prompt_logprobs": None}),
        _choices({"index": 0, "prompt_logprobs": [None]}),
        _choices({"index": 0, "prompt_logprobs": [None, {"7": {"logprob": -1}}]}),
        _choices({"index": 0, "prompt_logprobs": [None, {"2": {"logprob": None}}]}),
    ],
)
def test_a_server_that_gives_no_log_probabilities_says_so(bad: Answer) -> None:
    fake = FakeServer(**{"v1/completions": bad})
    with _server(fake) as server, pytest.raises(ServerError):
        server.logprobs([[1, 2]])
