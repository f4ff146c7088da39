"""The leading agent's side: names the version to stage, and waits for the other hosts."""

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from http import HTTPStatus
from typing import Final

import httpx

from trainsync.agent.endpoint import Answer
from trainsync.agent.hosts.wire import (
    STAGED_PATH,
    StagedThere,
    Wanted,
    WireError,
    decode_staged,
    encode_wanted,
)
from trainsync.agent.version import Version
from trainsync.engines.servers.calls import ServerCalls
from trainsync.engines.servers.errors import ServerError
from trainsync.weights.errors import DigestMismatchError, WeightsUnavailableError
from trainsync.weights.staging.index import StagedReference

_ANSWER_SECONDS: Final = 5.0


class OtherHosts:
    """The agents on the other hosts of a server's engine.

    `answer` of any thread, the rest of one thread.

    Args:
        urls: of the agents, in the order of the hosts' ranks, from 1 on.
        poll: seconds between two questions to an agent.
        transport: of httpx; for tests.
    """

    def __init__(
        self,
        urls: Sequence[str],
        poll: float = 0.2,
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        self._agents = [ServerCalls(url, transport) for url in urls]
        self._poll = poll
        self._wanted = Wanted(None)

    def answer(self) -> Answer:
        """The page that the other agents read."""
        return HTTPStatus.OK, "application/json", encode_wanted(self._wanted)

    def want(self, version: Version) -> None:
        """Tell the other agents to stage a version."""
        self._wanted = Wanted(version)

    def joined(
        self,
        tag: str,
        here: StagedReference,
        content: str,
        deadline: float,
        stop: threading.Event,
        check: Callable[[bool], None],
    ) -> StagedReference:
        """The reference to a version, with those of the other hosts once each host has staged it.

        Args:
            tag: of the version, which `want` was told of.
            content: digest of its tensors on this host.
            deadline: `time.monotonic`.
            stop: ends a pause between two questions.
            check: called during the wait, with whether a host fails to stage the version; raises
                to end the wait.

        Raises:
            WeightsUnavailableError: a host does not have the version in time.
            DigestMismatchError: a host staged other bytes under that tag.
            Also errors of ``check``.
        """
        found = []
        for rank, agent in enumerate(self._agents, 1):
            while (staged := self._staged(rank, agent, tag, content, deadline, check)) is None:
                stop.wait(self._poll)
            found.append(staged)
        return replace(here, hosts=tuple(found))

    def close(self) -> None:
        """Close connections."""
        for agent in self._agents:
            agent.close()

    def _staged(
        self,
        rank: int,
        agent: ServerCalls,
        tag: str,
        content: str,
        deadline: float,
        check: Callable[[bool], None],
    ) -> StagedReference | None:
        """The host's reference to the version; None: the host has not staged it yet."""
        late = time.monotonic() >= deadline
        try:
            there, why = _ask(agent), "it stages another version"
            why = there.error or why
        except (ServerError, WireError) as error:
            there, why = None, str(error)
        if there is not None and there.tag == tag:
            if there.content != content:
                raise DigestMismatchError(
                    f"host {rank} ({agent.name}) staged {there.content or 'nothing'} as version "
                    f"{tag}, expected {content}: do all agents have the same --dtype?"
                )
            return StagedReference(there.index, there.digest)
        if late:
            raise WeightsUnavailableError(
                f"host {rank} ({agent.name}) does not have version {tag} in time: {why}"
            )
        check(there is not None and there.failed == tag)
        return None


def _ask(agent: ServerCalls) -> StagedThere:
    status, said = agent.raw("GET", STAGED_PATH, time.monotonic() + _ANSWER_SECONDS)
    if status != HTTPStatus.OK:
        raise WireError(f"{agent.name}{STAGED_PATH} answered {status}")
    return decode_staged(said)
