"""Rollout servers' client, the check of their tokens, and the promises of ``make demo-vllm``."""

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from tiny_grpo.config import Config
from tiny_grpo.policy.model import answer_logprobs, build_model
from tiny_grpo.policy.task import make_prompts, solve
from tiny_grpo.policy.tokenizer import encode
from vllm_grpo import rollouts
from vllm_grpo.history import Step, step_of
from vllm_grpo.local_servers import gauge_in
from vllm_grpo.model_folder import write_model
from vllm_grpo.promises import Events, check
from vllm_grpo.reference import Reference
from vllm_grpo.rollouts import (
    FindServers,
    RolloutError,
    Sampled,
    Server,
    UnprovenError,
    proven_tag,
    read,
    sample,
)
from vllm_grpo.trainer import importance

CONFIG = Config(digits=2, hidden_size=32, layers=1, trainers=1, explorers=1, prompts=20)
PROMPTS = make_prompts(CONFIG.digits, 0, "train", range(CONFIG.prompts))
SERVERS = [Server(name, f"http://{name}", f"http://{name}-agent") for name in ("a", "b")]
TAGS = {version: f"{version}-{version:016x}" for version in range(10)}


def choice(index: int, tokens: list[int], *spans: tuple[str, int, int]) -> dict[str, Any]:
    return {
        "index": index,
        "token_ids": tokens,
        "logprobs": {"content": [{"token_id": token, "logprob": -0.5} for token in tokens]},
        "weight_versions": [dict(zip(("version", "start", "end"), s, strict=True)) for s in spans],
    }


@dataclass
class Fake:
    """A server with its agent: answers rightly, with its version."""

    version: int = 4
    ready: bool = True
    verdict: str = "proven"
    status: int = 200
    fail: Callable[[int], bool] = lambda _: False
    says: Callable[[int], int | None] = lambda _: None
    asked: int = field(default=0)

    def generate(self, body: Mapping[str, Any]) -> httpx.Response:
        self.asked += 1
        if self.status != 200:
            return httpx.Response(self.status, text="--enable-scale-out is missing")
        if self.fail(self.asked):
            raise httpx.ReadError("the server died")
        prompt = "".join(str(token) for token in body["token_ids"][:-1]) + "="
        said = self.says(self.asked)
        tag = TAGS[self.version if said is None else said]
        answers = range(body["sampling_params"]["n"])
        choices = [choice(n, encode(solve(prompt)), (tag, 0, CONFIG.digits)) for n in answers]
        return httpx.Response(200, json={"choices": choices[::-1]})

    def agent(self, path: str) -> httpx.Response:
        if path == "/readyz":
            return httpx.Response(200 if self.ready else 503, text="it is not ready")
        proof = {"version": TAGS[self.version], "verdict": self.verdict}
        return httpx.Response(200, json={"serverSays": TAGS[self.version], "proof": proof})


@pytest.fixture
def fakes(monkeypatch: pytest.MonkeyPatch) -> dict[str, Fake]:
    """Behind the hosts of `SERVERS`."""
    made = {server.name: Fake() for server in SERVERS}

    async def answer(request: httpx.Request) -> httpx.Response:
        await asyncio.sleep(0)
        fake = made[request.url.host.removesuffix("-agent")]
        if request.url.host.endswith("-agent"):
            return fake.agent(request.url.path)
        content = httpx.Response(200, content=request.content).json()
        return fake.generate(content)

    class Client(httpx.AsyncClient):
        def __init__(self, **options: Any) -> None:
            super().__init__(**options, transport=httpx.MockTransport(answer))

    monkeypatch.setattr(rollouts.httpx, "AsyncClient", Client)
    return made


def ask(oldest: int = 0, timeout: float = 60.0, find: FindServers = lambda: SERVERS) -> Sampled:
    return sample(find, PROMPTS, 3, oldest=oldest, timeout=timeout)


def test_answers_come_in_the_order_of_their_prompts_from_both_servers(
    fakes: dict[str, Fake],
) -> None:
    fakes["b"].version = 6
    sampled = ask()
    tokens = [encode(p + solve(p)) for p in PROMPTS for _ in range(3)]
    assert sampled.rollouts.tokens.tolist() == tokens
    assert sampled.rollouts.rewards.tolist() == [1.0] * len(tokens)
    assert set(sampled.servers) == {"a", "b"}
    wanted = [[4 if name == "a" else 6] * CONFIG.digits for name in sampled.servers]
    assert sampled.versions.tolist() == wanted
    assert (sampled.refused, dict(sampled.failures)) == (0, {})


@pytest.mark.parametrize(
    "change",
    [
        {"ready": False},
        {"verdict": "refuted"},
        {"verdict": "absent"},
        {"version": 2},  # older than is allowed
    ],
)
def test_a_server_that_is_not_ready_not_proven_or_too_old_is_never_asked(
    change: dict[str, Any], fakes: dict[str, Fake]
) -> None:
    fakes["a"] = Fake(**change)
    assert set(ask(oldest=3).servers) == {"b"}
    assert fakes["a"].asked == 0


def test_prompts_of_a_server_that_dies_are_answered_by_the_other_one(
    fakes: dict[str, Fake],
) -> None:
    fakes["a"].fail = lambda _: True
    sampled = ask()
    assert set(sampled.servers) == {"b"}
    assert sampled.failures["a"] > 0
    assert sampled.rollouts.rewards.mean() == 1


@pytest.mark.parametrize("status", [404, 429, 500])
def test_a_server_that_does_not_answer_rightly_loses_its_prompts_to_the_other_one(
    status: int, fakes: dict[str, Fake]
) -> None:
    fakes["a"].status = status
    assert set(ask().servers) == {"b"}


def test_a_server_that_refuses_prompts_ends_the_step_with_its_words(
    fakes: dict[str, Fake],
) -> None:
    fakes["a"].status = 422
    with pytest.raises(RolloutError, match="a answered 422: --enable-scale-out is missing"):
        ask()


def test_answers_of_weights_that_the_agent_has_not_proven_are_asked_again(
    fakes: dict[str, Fake],
) -> None:
    for fake in fakes.values():
        fake.says = lambda asked: 9 if asked == 1 else None
    sampled = ask()
    assert sampled.refused == 6  # an answer of three, of each
    assert set(sampled.versions.flatten().tolist()) == {4}


def test_a_server_that_comes_while_none_is_there_answers(
    fakes: dict[str, Fake], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rollouts, "_FIND_SECONDS", 0.01)
    fakes["a"].ready = False
    there = iter([[], SERVERS[:1]])
    assert set(ask(find=lambda: next(there, SERVERS)).servers) == {"b"}


def test_without_a_server_the_error_says_what_is_the_matter_with_each(
    fakes: dict[str, Fake],
) -> None:
    fakes["a"].ready, fakes["b"].version = False, 1
    with pytest.raises(RolloutError, match=r"'a': 'it is not ready', 'b': 'it has 1-.*, and 3 is"):
        ask(oldest=3, timeout=2.0)


def test_an_answer_that_two_proven_versions_made_has_the_version_of_each_token() -> None:
    answer = read(choice(0, [5, 6, 7], (TAGS[2], 0, 1), (TAGS[4], 1, 3)), {TAGS[2], TAGS[4]})
    assert answer.versions == [2, 4, 4]


@pytest.mark.parametrize(
    "spans",
    [
        [(TAGS[2], 0, 1), (TAGS[4], 1, 3)],  # 2 is not proven
        [("4", 0, 3)],  # a version of that number, and not known to be these weights
        [("default", 0, 3)],  # of the folder that the server was started with
        [(TAGS[4], 0, 2)],
        [],
    ],
)
def test_an_answer_with_a_token_of_unknown_weights_is_refused(
    spans: list[tuple[str, int, int]],
) -> None:
    with pytest.raises(UnprovenError):
        read(choice(0, [5, 6, 7], *spans), {TAGS[4], "default"})


def test_a_server_without_weights_of_a_judged_version_has_no_proven_weights() -> None:
    judged = {"version": TAGS[4], "verdict": "proven"}
    assert proven_tag({"serverSays": TAGS[4], "proof": judged}) == TAGS[4]
    assert proven_tag({"serverSays": TAGS[5], "proof": judged}) is None
    assert proven_tag({"serverSays": None, "proof": None}) is None


def test_tokens_of_other_weights_than_those_of_their_version_are_found(
    fakes: dict[str, Fake],
) -> None:
    sampled = ask()
    reference = Reference(CONFIG, tolerance=1e-4, keep=2)
    model = build_model(CONFIG)
    for version in (3, 4):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1.1)
            exact = answer_logprobs(model, sampled.rollouts.tokens)
        reference.remember(version, model)
    tokens = exact.numel()
    of_four = replace(sampled, rollouts=replace(sampled.rollouts, logprobs=exact))
    assert reference.check(of_four).unproven == 0

    mixed = of_four.versions.clone()
    mixed[0, 0] = 3
    assert reference.check(replace(of_four, versions=mixed)).unproven == 1
    unknown = replace(of_four, versions=torch.full_like(mixed, 2))
    assert reference.check(unknown).unproven == tokens
    nan = replace(sampled.rollouts, logprobs=torch.full_like(exact, torch.nan))
    assert reference.check(replace(of_four, rollouts=nan)).unproven == tokens


def test_an_answer_counts_by_how_likely_it_is_now_and_at_most_twice() -> None:
    served = torch.full((3, 2), 0.5).log()
    present = torch.tensor([[0.5, 0.5], [0.25, 0.5], [1.0, 1.0]]).log()
    torch.testing.assert_close(importance(present, served), torch.tensor([1.0, 0.5, 2.0]))


def test_a_reference_forgets_the_oldest_versions(fakes: dict[str, Fake]) -> None:
    sampled, reference = ask(), Reference(CONFIG, tolerance=1e9, keep=2)
    for version in (4, 5, 6):
        reference.remember(version, build_model(CONFIG))
    assert reference.check(sampled).unproven == sampled.versions.numel()


def test_a_step_counts_tokens_by_server_and_version(fakes: dict[str, Fake]) -> None:
    fakes["b"].version = 6
    sampled = ask()
    checked = Reference(CONFIG, tolerance=1.0, keep=1).check(sampled)
    step = step_of(9, sampled, checked, 1.5)
    assert sum(step.tokens.values()) == sampled.versions.numel()
    assert set(step.tokens) == {("a", 4), ("b", 6)}
    assert (step.servers, step.oldest, step.metrics()["staleness"]) == (["a", "b"], 4, 4.0)


def test_the_models_folder_has_the_tokens_of_the_task(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    folder = write_model(tmp_path, CONFIG)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.encode("38=") == encode("38=")
    assert tokenizer.decode(encode("38")) == "38"


def test_a_value_is_read_from_a_page_of_metrics() -> None:
    page = '# HELP x\nx_total{verdict="proven"} 2.0\nx_total{verdict="refuted"} 3.0\n'
    assert gauge_in(page, 'x_total{verdict="refuted"}') == 3
    assert gauge_in(page, "y") == 0


TOTAL = 20
EVENTS = Events("a", 5, 8, "b", 15, {"a": 0, "b": 0})


def good_steps() -> list[Step]:
    def servers(step: int) -> list[str]:
        if step > EVENTS.take_out:
            return ["a"]
        return ["b"] if EVENTS.kill + 1 < step <= 12 else ["a", "b"]

    return [
        Step(n, n / TOTAL, {(s, n - 1): 10 for s in servers(n)}, 0, 1e-5, 0, {}, 1.0)
        for n in range(1, TOTAL + 1)
    ]


def broken(steps: list[Step], events: Events = EVENTS) -> list[str]:
    return [promise.text for promise in check(steps, TOTAL, events) if not promise.kept]


def test_a_run_as_it_should_be_keeps_every_promise() -> None:
    assert broken(good_steps()) == []


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda steps: steps[:-1], "ends at its last step"),
        (lambda steps: [replace(s, reward=0.5) for s in steps], "reward rises"),
        (lambda steps: steps[:9], "reward rises"),
        (lambda steps: [s for s in steps if not 6 < s.step <= 8], "while the other one is dead"),
        (lambda steps: [replace(s, tokens={("b", 1): 1}) for s in steps], "comes back"),
        (lambda steps: steps[:15], "is taken out"),
        (lambda steps: [replace(s, tokens={("b", 1): 1}) for s in steps], "is taken out"),
        (lambda steps: [replace(s, unproven=s.step // TOTAL) for s in steps], "each token"),
        (lambda steps: [replace(s, tokens={}) for s in steps], "each token"),
    ],
)
def test_steps_that_break_a_promise_are_told(
    change: Callable[[list[Step]], list[Step]], text: str
) -> None:
    assert any(text in promise for promise in broken(change(good_steps())))


@pytest.mark.parametrize("refuted", [{"a": 1, "b": 0}, {"a": 0}])
def test_refuted_weights_and_an_agent_that_was_not_asked_are_told(refuted: dict[str, int]) -> None:
    assert broken(good_steps(), replace(EVENTS, refuted=refuted)) == [
        "no server's weights were refuted"
    ]
