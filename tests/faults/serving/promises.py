"""Promises of servers and their agents, checked on what client and server wrote down."""

import re
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainsync.engines.servers.tags import version_in
from trainsync.storage.layout import RunDirectory
from trainsync.storage.leases import LONGEST_TTL_SECONDS, LeaseBook

from tests.faults.processes import BrokenError
from tests.faults.serving.model import START, Reference, Variant
from tests.faults.serving.server import START_TAG

Record = dict[str, Any]

_SEGMENT = re.compile(r"trainsync-weights-[^ ]+")
_MOST_MAPPED = 2  # a reader keeps what it may read again


@dataclass(frozen=True)
class Times:
    """From and to, of the monotonic clock."""

    begin: float
    end: float


def check_answers(
    records: Iterable[Record],
    begun: Iterable[Variant],
    *,
    lies: bool = False,
    broken: Sequence[Times] = (),
) -> list[int]:
    """Check every answer; returns the versions of those that count as served, in order.

    An answer counts when the server was ready before and after it, with the same version of the
    same attempt. All its
    tokens must be of that version then, which is proven. Any other answer may be of several
    versions, as that of a request which goes on through an update, but no token of two.

    Args:
        begun: weights that trainers had.
        lies: the server has loaded other weights than it says: only what counts is checked.
        broken: when it may have answered with an error, since it was dying.
    """
    reference = Reference()
    candidates: dict[str, list[Variant]] = {START_TAG: [START]}
    known = sorted(set(begun))
    served = []
    for record in records:
        before, after = record["before"], record["after"]
        counts = before == after
        if record["status"] != 200:
            if any(times.begin <= record["at"] <= times.end for times in broken):
                continue
            raise BrokenError(f"a ready server answered {record['status']}")
        if lies and not counts:
            continue
        tokens = list(record["prompt"])
        for token, logprob, tag in record["tokens"]:
            tokens.append(token)
            of = candidates.setdefault(tag, [v for v in known if v[1] == version_in(tag)])
            left = [variant for variant in of if reference.makes(variant, tokens, logprob)]
            if not left:
                raise BrokenError(f"an answer says {tag!r}, and is not of its weights: {record}")
            candidates[tag] = left
        if counts:
            tag, proven, _ = before
            wrong = {name for _, _, name in record["tokens"]} - {tag}
            if proven != tag or wrong:
                raise BrokenError(f"ready with {tag!r}, of which {proven!r} is proven: {record}")
            version = version_in(tag)
            if version is None:
                raise BrokenError(f"ready with {tag!r}, which no trainer made: {record}")
            served.append(version)
    return served


def check_pauses(
    events: Sequence[Record], end: float, bound: float, excused: Iterable[Times] = ()
) -> float:
    """Check that the server was never paused for longer than ``bound``; returns the longest pause.

    Args:
        events: of the servers; the start of another one ends a pause.
        end: when the server was looked at last.
        excused: what does not count: times in which there was no agent, or the server was broken.
    """
    longest, began = 0.0, None
    for event in [*events, {"event": "over", "at": end}]:
        if event["event"] == "paused":
            began = event["at"] if began is None else began
        elif event["event"] in ("resumed", "started", "over") and began is not None:
            lasted = _outside(Times(began, event["at"]), excused)
            longest, began = max(longest, lasted), None
    if longest > bound:
        raise BrokenError(f"the server was paused for {longest:.2f} s, more than {bound:g} s")
    return longest


def _outside(times: Times, excused: Iterable[Times]) -> float:
    left = [times]
    for gap in excused:
        left = [
            Times(*pair)
            for part in left
            for pair in (
                (part.begin, min(part.end, gap.begin)),
                (max(part.begin, gap.end), part.end),
            )
            if pair[0] < pair[1]
        ]
    return sum(part.end - part.begin for part in left)


def check_memory(memory: Path) -> None:
    """Check that nothing lies in the shared memory after the agents' end."""
    left = sorted(str(path.relative_to(memory)) for path in memory.rglob("*"))
    if left:
        raise BrokenError(f"left in shared memory: {left}")


def check_temporaries(run: Path) -> None:
    """Check that no temporary file lies in the run's directory, but for those of leases.

    A reader that is killed leaves one, and the monitor removes it after an hour.
    """
    in_an_hour = LeaseBook(RunDirectory(run), lambda: time.time() + LONGEST_TTL_SECONDS)
    in_an_hour.remove_expired(time.monotonic())
    left = [str(path) for path in run.rglob(".*.tmp")]
    if left:
        raise BrokenError(f"left in the run's directory: {left}")


def check_mapped(pid: int, memory: Path) -> None:
    """Check that a process keeps no more segments of a folder mapped than it may read again."""
    maps = Path(f"/proc/{pid}/maps").read_text()
    lines = [line.split(maxsplit=5) for line in maps.splitlines() if _SEGMENT.search(line)]
    mapped = {inode for *_, inode, path in lines if path.startswith(f"{memory}/")}
    if len(mapped) > _MOST_MAPPED:
        raise BrokenError(f"a server keeps {len(mapped)} segments mapped")


def check_children(pid: int, known: Iterable[int]) -> None:
    """Check that a process has no children but the ``known``."""
    listed = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    if others := {int(child) for child in listed} - set(known):
        raise BrokenError(f"processes are left: {sorted(others)}")
