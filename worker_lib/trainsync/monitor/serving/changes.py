"""Which inference servers were refuted, or proven again, between two looks, in words. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from trainsync.api.status import ProofVerdict, ServerWeights

_NAMED: Final = 4


@dataclass(frozen=True)
class ServerChanges:
    """A sentence for each sort of change; None where there was none."""

    refuted: str | None
    proven: str | None


def between(before: Mapping[str, ServerWeights], now: Mapping[str, ServerWeights]) -> ServerChanges:
    """The changes from ``before`` to ``now``, both by name.

    A server that was refuted and proven again since ``before`` is in both sentences.
    """
    refuted = [s for s in now.values() if _was_refuted(s, before.get(s.name))]
    proven = [
        s
        for s in now.values()
        if s.verdict is ProofVerdict.PROVEN and (_is_refuted(before.get(s.name)) or s in refuted)
    ]
    return ServerChanges(
        refuted=_sentence(refuted, "does not compute with its version", why=True),
        proven=_sentence(proven, "is proven again", why=False),
    )


def _was_refuted(server: ServerWeights, before: ServerWeights | None) -> bool:
    # One that was not seen before may have been refuted, and proven again, long ago.
    counted = server.refutations if before is None else before.refutations
    # A new agent counts anew.
    new = server.refutations > 0 if server.refutations < counted else server.refutations > counted
    return new or (_is_refuted(server) and not _is_refuted(before))


def _is_refuted(server: ServerWeights | None) -> bool:
    return server is not None and server.verdict is ProofVerdict.REFUTED


def _sentence(servers: list[ServerWeights], what: str, *, why: bool) -> str | None:
    if not servers:
        return None
    if len(servers) == 1:
        said = why and _is_refuted(servers[0]) and servers[0].message
        return f"Server {servers[0].name} {what}" + (f": {said}." if said else ".")
    named = [server.name for server in servers]
    more = f" and {len(named) - _NAMED} more" if len(named) > _NAMED else ""
    return f"{len(servers)} servers, of which each {what}: {', '.join(named[:_NAMED])}{more}."
