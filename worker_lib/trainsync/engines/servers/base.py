"""The driver of a server: the same calls for every kind of server.

Use in place of an agent, on the server's host, as its user::

    area = StagingArea()  # of trainsync.weights.staging.area: in /dev/shm; or StagingArea(folder)
    server = VLLMServer("http://127.0.0.1:8000")  # pause="keep"
    prover = ServerProver(server)  # of `proving`; one for each server process
    update = server.update(7, area.stage(7, state_dict))
    update.pause_seconds, server.version()  # how long nothing was generated; 7
    # of trainsync.weights.proof.record; None: the version was saved without a proof
    if (proof := read_proof(directory, manifest)) is not None:
        verdict = prover.prove(proof)  # Proven, or Refuted(reason, canary, off)

After `UpdateRefusedError` (the staged version is gone, torn or of another model) the server serves
the weights that it had. After `ServerPausedError`, or when the program died in an update, it is
paused until an update succeeds. For another folder than /dev/shm, set TRAINSYNC_STAGING_MEMORY for
the server.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from trainsync.weights.staging.index import StagedReference

PauseMode = Literal["keep", "wait", "abort"]
"""What becomes of requests that run: they go on after the update, it waits for them, or they end at
once with what they have."""


@dataclass(frozen=True)
class Update:
    """An update that succeeded.

    Attributes:
        version: that the server serves from now on.
        prepare_seconds: that it looked at the version, while it served.
        pause_seconds: from the call to pause to the answer to resume.
    """

    version: int
    prepare_seconds: float
    pause_seconds: float


class ServerDriver(Protocol):
    """One server. Every call ends within the driver's deadlines. One thread."""

    def tag(self) -> str:
        """The name that the server gives its weights, see `trainsync.engines.servers.tags`.

        Raises:
            ServerError: no such answer.
        """
        ...

    def version(self) -> int | None:
        """The version of that name; None: not one of a trainer. Raises as `tag` does."""
        ...

    def is_paused(self) -> bool:
        """Whether it generates nothing now. Raises as `tag` does."""
        ...

    def is_alive(self) -> bool:
        """Whether its process works, paused or not. Of any thread. Raises as `tag` does."""
        ...

    def update(self, version: int, staged: StagedReference, tag: str | None = None) -> Update:
        """Make the server serve a staged version.

        Args:
            tag: its name from then on; None: the number.

        Raises:
            UpdateRefusedError: it serves the weights that it had.
            ServerPausedError: it serves nothing before an update succeeds.
        """
        ...

    def logprobs(self, prompts: Sequence[Sequence[int]]) -> tuple[tuple[float, ...], ...]:
        """The server's log-probabilities of each prompt's tokens from the second on, each given
        those before it, in nats.

        A paused server answers nothing, so ask after `update`: it generates again then. Until its
        answers are compared, keep it from being ready, so that no request is routed to it. They are
        computed anew each time: a cache tells nothing of weights.

        Args:
            prompts: token ids, two or more each.

        Raises:
            ServerError: no such answer. A server with broken weights may give none.
        """
        ...


class OwnedDriver(ServerDriver, Protocol):
    """A driver that its maker closes."""

    def close(self) -> None:
        """Let go of connections; the server stays as it is."""
        ...
