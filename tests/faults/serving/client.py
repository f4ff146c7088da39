"""A client that asks the server all the while that its agent says ready, and notes the answers."""

import http.client
import json
import random
import threading
from contextlib import closing, suppress
from pathlib import Path
from typing import Any, Final

from tests.faults.processes import Line
from tests.faults.serving.model import VOCABULARY
from tests.faults.serving.server import Log

_HERE: Final = "127.0.0.1"
_SECONDS: Final = 10.0
_PAUSE: Final = 0.04
_KINDS: Final = ((4, 0.0), (24, 0.4))
"""Tokens and seconds of a request: short ones, and those that live through an update."""


def ready_with(agent: int, host: str = _HERE) -> dict[str, Any] | None:
    """The status of an agent that says ready; None: it does not, or it does not answer."""
    with suppress(OSError, http.client.HTTPException, ValueError):
        if _get(host, agent, "/readyz")[0] == http.client.OK:
            status: dict[str, Any] = json.loads(_get(host, agent, "/status.json")[1])
            return status if status["ready"] else None
    return None


def asking(line: Line, server: int, agent: int, log: Path, seed: int) -> None:
    """Ask until ``end``. Ports of the server and its agent."""
    notes, stop = Log(log), threading.Event()
    threads = [
        threading.Thread(
            target=_ask_on, args=(server, agent, notes, stop, f"{seed} {kind}", *kind), daemon=True
        )
        for kind in _KINDS
    ]
    for thread in threads:
        thread.start()
    line.say("asking")
    line.hear(600)
    stop.set()
    for thread in threads:
        thread.join(2 * _SECONDS)


def _ask_on(
    server: int, agent: int, notes: Log, stop: threading.Event, seed: str, count: int, lasts: float
) -> None:
    dice = random.Random(seed)
    while not stop.wait(_PAUSE):
        prompt = [dice.randrange(VOCABULARY) for _ in range(dice.randint(1, 6))]
        body = json.dumps({"prompt": prompt, "count": count, "seconds": lasts})
        connection = http.client.HTTPConnection(_HERE, server, timeout=_SECONDS)
        with closing(connection), suppress(OSError, http.client.HTTPException, ValueError):
            # Before the agent is asked: a server that comes in the place of this one never answers.
            connection.connect()
            before = ready_with(agent)
            if before is None:
                continue
            connection.request("POST", "/generate", body)
            answer = connection.getresponse()
            said = json.loads(answer.read())
            after = ready_with(agent)
            notes.add(
                "answered",
                status=answer.status,
                prompt=prompt,
                tokens=said.get("tokens", []),  # an error has none
                before=_proven(before),
                after=None if after is None else _proven(after),
            )


def _proven(status: dict[str, Any]) -> list[str | int | None]:
    """What the server says it has, what is proven of it, and the attempt: the next one may publish
    the same version again, after another one in between."""
    proof = status["proof"] or {}
    proven = proof.get("version") if proof.get("verdict") == "proven" else None
    return [status["serverSays"], proven, status["attempt"]]


def _get(host: str, port: int, path: str) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection(host, port, timeout=_SECONDS)
    with closing(connection):
        connection.request("GET", path)
        answer = connection.getresponse()
        return answer.status, answer.read()


def status_of(agent: int, host: str = _HERE) -> dict[str, Any]:
    """An agent's ``/status.json``; empty while it does not answer."""
    with suppress(OSError, http.client.HTTPException, ValueError):
        found: dict[str, Any] = json.loads(_get(host, agent, "/status.json")[1])
        return found
    return {}


def fetched(agent: int, source: str, host: str = _HERE) -> float:
    """Bytes that an agent has had from a source; 0 while it does not answer."""
    with suppress(OSError, http.client.HTTPException):
        text = _get(host, agent, "/metrics")[1].decode()
        name = f'trainsync_agent_fetched_bytes_total{{source="{source}"}} '
        return sum(float(line[len(name) :]) for line in text.splitlines() if line.startswith(name))
    return 0.0
