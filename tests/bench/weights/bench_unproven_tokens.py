"""Tokens of a ready server that unproven weights made, over updates of which half load wrongly.

A server of the fault matrix, with its agent, trainer and client: as ``server_refuses`` in
``tests/faults``. In a drawn half of the updates the server loads other weights than were staged,
and says that it has the version. A token counts when the agent said ready, with one version, before
and after its request; it is unproven when other weights made it than the trainer had at that
version, as is computed anew for each. The peer is the same without proofs: the trainer publishes
none, and the agent takes versions without (``--proof if-present``). After each update, and after
each refusal, the client asks on for as long in both.

The figure is ours. The peer's must be above 0, else the benchmark sees nothing, and fails.
"""

import os
import random
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from trainsync.engines.servers.tags import version_in
from trainsync.weights.transports.shared_memory.segment import SHARED_MEMORY

from tests.bench.harness import Figure
from tests.faults.serving.model import Reference
from tests.faults.serving.scene import Scene
from tests.faults.serving.server import LOADING, Fault, How
from tests.faults.trial import Trial

UPDATES: Final = int(os.environ.get("TRAINSYNC_BENCH_UPDATES", "40"))
_FIRST: Final = 2  # version 1 is loaded before the client is looked at
_DWELL_SECONDS: Final = 1.0
_SERVED_SECONDS: Final = 120.0


@dataclass(frozen=True)
class Tokens:
    """Of one side."""

    unproven: int
    all: int


def run() -> list[Figure]:
    """`unproven_tokens`.

    Raises:
        RuntimeError: the peer made no unproven token, or a side made no token at all.
    """
    ours, peer = _updated(proves=True), _updated(proves=False)
    if not (ours.all and peer.unproven):
        raise RuntimeError(f"nothing was seen: ours {ours}, the peer {peer}")
    details = {
        "updates": float(UPDATES),
        "wrong_loads": float(len(wrong_updates())),
        "tokens": float(ours.all),
        "peer_unproven_tokens": float(peer.unproven),
        "peer_tokens": float(peer.all),
    }
    return [
        Figure(
            "unproven_tokens",
            float(ours.unproven),
            "tokens",
            "<= 0",
            f"without proofs: {peer.unproven} of {peer.all} tokens",
            details,
        )
    ]


def wrong_updates() -> frozenset[int]:
    """The versions that the server loads wrongly: a half, the same for both sides."""
    versions = range(_FIRST, _FIRST + UPDATES)
    return frozenset(random.Random("unproven tokens").sample(versions, UPDATES // 2))


def count(records: list[dict[str, Any]]) -> Tokens:
    """Tokens of a client's records; see the module."""
    reference = Reference()
    unproven = total = 0
    for record in records:
        version = version_in(record["before"][0])
        if record["before"] != record["after"] or version is None:
            continue
        tokens = list(record["prompt"])
        for token, logprob, _ in record["tokens"]:
            tokens.append(token)
            total += 1
            unproven += not reference.makes((0, version), tokens, logprob)
    return Tokens(unproven, total)


def _updated(*, proves: bool) -> Tokens:
    with (
        tempfile.TemporaryDirectory() as folder,
        tempfile.TemporaryDirectory(dir=SHARED_MEMORY, prefix="test-") as memory,
        Trial(0, Path(folder), "updates") as trial,
    ):
        on = Scene(trial, Path(memory))
        try:
            on.proves = proves
            options = () if proves else ("--proof=if-present",)
            on.begin(None, Fault(LOADING, How.WRONG), *options)
            wrong = wrong_updates()
            for version in range(_FIRST, _FIRST + UPDATES):
                _update(on, version, is_wrong=version in wrong)
            on.end_client()
            return count(on.answers())
        finally:
            trial.end()
            on.close()


def _update(on: Scene, version: int, *, is_wrong: bool) -> None:
    """One update, and a while in which the client asks."""
    refused = is_wrong and on.proves
    if is_wrong:
        on.arm(on.server)
    on.publish(version)
    if refused:
        on.until(lambda: _refuted(on, version), f"version {version} is refuted", _SERVED_SECONDS)
    else:
        on.until_served(version, _SERVED_SECONDS)
    time.sleep(_DWELL_SECONDS)  # what is counted: equally long for both sides
    if is_wrong:
        on.server.tell("heal")
    if refused:  # it is loaded again
        on.until_served(version, _SERVED_SECONDS)


def _refuted(on: Scene, version: int) -> bool:
    proof = on.status.get("proof") or {}
    return proof.get("verdict") == "refuted" and version_in(proof["version"]) == version
