"""Answers from servers that follow the run; each token says which version of the weights made it.

The client needs two things of a server, and each has its own source:

- which weights made a token: vLLM says so itself, in the answer of ``/inference/v1/generate``
  (``vllm serve --enable-scale-out``);
- whether these weights are proven: the agent knows. A prompt is sent to a server that its agent
  calls ready, and an answer counts when the agent, asked before and after, has proven the weights
  of each of its tokens. Other answers are thrown away, and their prompts asked again.
"""

import asyncio
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import httpx
import torch
from tiny_grpo.policy.rollout import Rollouts
from tiny_grpo.policy.task import reward
from tiny_grpo.policy.tokenizer import decode, encode
from trainsync.engines.servers.tags import version_in

_CHUNK: Final = 8  # prompts between two looks at the agent
_IDLE_SECONDS: Final = 0.05
_UNREADY_SECONDS: Final = 0.2
_CALL_SECONDS: Final = 60.0
_FIND_SECONDS: Final = 2.0
_REFUSED: Final = (400, 422)


class RolloutError(Exception):
    """The answers did not come in time, or a server refuses such prompts."""


class UnprovenError(Exception):
    """A token was made with weights that are too old, or that no agent has proven."""


@dataclass(frozen=True)
class Server:
    """A vLLM server and the agent beside it, by their URLs."""

    name: str
    url: str
    agent: str


FindServers = Callable[[], Sequence[Server]]
"""Says at once which servers there are; asked again and again, as servers come and go."""


@dataclass(frozen=True)
class Answer:
    """One answer: for each token its id, its log-probability and the version that made it."""

    tokens: list[int]
    logprobs: list[float]
    versions: list[int]


@dataclass(frozen=True)
class Sampled:
    """The answers of a step, in the order of their prompts.

    Attributes:
        versions: ``(answers, digits)``, int64; of each token.
        servers: name of the server of each answer.
        refused: answers that were thrown away, since their weights were not proven.
        failures: by server, requests that failed and went to another server, or were asked again.
    """

    rollouts: Rollouts
    versions: torch.Tensor
    servers: list[str]
    refused: int
    failures: Mapping[str, int]


def sample(
    servers: FindServers,
    prompts: Sequence[str],
    group_size: int,
    *,
    oldest: int,
    timeout: float,
) -> Sampled:
    """``group_size`` answers to each prompt, at temperature 1, from whichever servers are ready.

    Args:
        oldest: version that a server must have to be asked.
        timeout: seconds for all of it.

    Raises:
        RolloutError: see there; the message says what is the matter with each server.
    """
    return asyncio.run(_Sampling(prompts, group_size, oldest).run(servers, timeout))


class _Sampling:
    """One call of `sample`: a worker for each server takes prompts from one queue."""

    def __init__(self, prompts: Sequence[str], group_size: int, oldest: int) -> None:
        self._prompts = prompts
        self._group_size = group_size
        self._oldest = oldest
        self._waiting = deque(range(len(prompts)))
        self._answers: dict[int, tuple[str, list[Answer]]] = {}
        self._refused = 0
        self._failures: dict[str, int] = {}
        self._unready: dict[str, str] = {}

    async def run(self, find: FindServers, seconds: float) -> Sampled:
        deadline = time.monotonic() + seconds
        workers: dict[Server, asyncio.Task[None]] = {}
        async with httpx.AsyncClient(timeout=_CALL_SECONDS, trust_env=False) as http:
            try:
                # A worker ends when all prompts are answered, or with what is wrong.
                while not (ended := [worker for worker in workers.values() if worker.done()]):
                    left = deadline - time.monotonic()
                    if left <= 0:
                        raise RolloutError(f"no answers within {seconds:g} s: {self._unready}")
                    for server in find():
                        if server not in workers:
                            workers[server] = asyncio.create_task(self._work(server, http))
                    await _wait(workers.values(), min(left, _FIND_SECONDS))
            finally:
                for worker in workers.values():
                    worker.cancel()
                await asyncio.gather(*workers.values(), return_exceptions=True)
        for worker in ended:
            worker.result()
        return self._joined()

    async def _work(self, server: Server, http: httpx.AsyncClient) -> None:
        while len(self._answers) < len(self._prompts):
            if not self._waiting:  # a prompt may come back from a server that fails
                await asyncio.sleep(_IDLE_SECONDS)
                continue
            if (before := await self._ready(server, http)) is None:
                await asyncio.sleep(_UNREADY_SECONDS)
                continue
            count = min(_CHUNK, len(self._waiting))
            taken = [self._waiting.popleft() for _ in range(count)]
            asked = [self._ask(server, http, number) for number in taken]
            found = await asyncio.gather(*asked, return_exceptions=True)
            proven = {before, await _proven(server.agent, http)}
            for number, answer in zip(taken, found, strict=True):
                self._take(server, number, answer, proven)
            if any(number not in self._answers for number in taken):
                await asyncio.sleep(_UNREADY_SECONDS)  # the other servers take these prompts

    async def _ready(self, server: Server, http: httpx.AsyncClient) -> str | None:
        """The weights of a server that may be asked; None: it may not."""
        try:
            answer = await http.get(f"{server.agent}/readyz")
        except httpx.HTTPError as error:
            self._unready[server.name] = f"its agent: {error!r}"
            return None
        tag = await _proven(server.agent, http) if answer.is_success else None
        if tag is None:
            self._unready[server.name] = answer.text.strip()
        elif (version_in(tag) or 0) < self._oldest:
            self._unready[server.name] = f"it has {tag}, and {self._oldest} is the oldest allowed"
            return None
        return tag

    async def _ask(self, server: Server, http: httpx.AsyncClient, number: int) -> Any:
        body = {
            "token_ids": encode(self._prompts[number]),
            "sampling_params": {
                "n": self._group_size,
                "max_tokens": len(self._prompts[number]) - 1,
                "temperature": 1.0,
                "logprobs": 0,
                "ignore_eos": True,
            },
        }
        answer = await http.post(f"{server.url}/inference/v1/generate", json=body)
        if answer.status_code in _REFUSED:  # each server would
            raise RolloutError(f"{server.name} answered {answer.status_code}: {answer.text}")
        answer.raise_for_status()
        return answer.json()

    def _take(
        self, server: Server, number: int, answer: Any, proven: Collection[str | None]
    ) -> None:
        try:
            if isinstance(answer, BaseException):
                raise answer
            choices = sorted(answer["choices"], key=lambda choice: choice["index"])
            group = [read(choice, proven, self._oldest) for choice in choices]
            self._answers[number] = server.name, group
        except (httpx.HTTPError, ValueError, KeyError, TypeError) as error:
            self._unready[server.name] = repr(error)
            self._failures[server.name] = self._failures.get(server.name, 0) + 1
            self._waiting.append(number)
        except UnprovenError as error:
            self._unready[server.name] = str(error)
            self._refused += self._group_size
            self._waiting.append(number)

    def _joined(self) -> Sampled:
        found = [self._answers[number] for number in range(len(self._prompts))]
        answers = [
            (prompt, name, answer)
            for prompt, (name, group) in zip(self._prompts, found, strict=True)
            for answer in group
        ]
        return Sampled(
            Rollouts(
                tokens=torch.tensor([encode(prompt) + a.tokens for prompt, _, a in answers]),
                logprobs=torch.tensor([a.logprobs for _, _, a in answers]),
                rewards=torch.tensor([reward(p, decode(a.tokens)) for p, _, a in answers]),
            ),
            versions=torch.tensor([a.versions for _, _, a in answers]),
            servers=[name for _, name, _ in answers],
            refused=self._refused,
            failures=self._failures,
        )


async def _wait(workers: Collection[asyncio.Task[None]], seconds: float) -> None:
    """Until one ends, or for so long."""
    if workers:
        await asyncio.wait(workers, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
    else:
        await asyncio.sleep(seconds)


async def _proven(agent: str, http: httpx.AsyncClient) -> str | None:
    """See `proven_tag`; None also where the agent does not answer."""
    try:
        answer = await http.get(f"{agent}/status.json")
        answer.raise_for_status()
    except httpx.HTTPError:
        return None
    return proven_tag(answer.json())


def proven_tag(status: Mapping[str, Any]) -> str | None:
    """The name of the weights that a server has, by its agent's status; None: not proven."""
    proof = status["proof"]
    if proof is None or proof["verdict"] != "proven" or proof["version"] != status["serverSays"]:
        return None
    return str(proof["version"])


def read(choice: Mapping[str, Any], proven: Collection[str | None], oldest: int = 0) -> Answer:
    """One answer of ``/inference/v1/generate``.

    Args:
        proven: names of weights.
        oldest: version that is allowed.

    Raises:
        UnprovenError: a token is of other weights, or the server does not say of which.
    """
    versions: list[int] = []
    for span in choice["weight_versions"] or ():
        tag = span["version"]
        version = version_in(tag)
        if version is None or version < oldest or tag not in proven:
            raise UnprovenError(f"tokens of {tag!r}; allowed are {proven}, from {oldest} on")
        versions += [version] * (span["end"] - span["start"])
    tokens = choice["token_ids"]
    if len(versions) != len(tokens):
        raise UnprovenError(f"{len(tokens)} tokens, and versions of {len(versions)}")
    return Answer(tokens, [token["logprob"] for token in choice["logprobs"]["content"]], versions)
