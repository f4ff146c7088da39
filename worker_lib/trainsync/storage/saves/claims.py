"""Claims: which incarnation of a job runs an attempt on a cluster, granted once and for ever."""

import re
from collections.abc import Callable, Container
from dataclasses import dataclass
from typing import Annotated, ClassVar, Final, Literal

from pydantic import AwareDatetime, ConfigDict, Field, TypeAdapter

from trainsync.storage import atomic, records
from trainsync.storage.errors import ClaimTakenError, UnsafePathError
from trainsync.storage.layout import RunDirectory
from trainsync.storage.saves.receipts import Count, Incarnation

LOCAL_UID: Final = "local"
"""The run's uid where there is no Kubernetes."""

_WORD: Final = "[A-Za-z0-9][A-Za-z0-9.-]{0,62}"
_NAME: Final = re.compile(f"^{_WORD}$")
_FILE: Final = re.compile(rf"{_WORD}-(0|[1-9][0-9]*)-{_WORD}\.json")


@dataclass(frozen=True, kw_only=True)
class Claim:
    """A granted claim."""

    __pydantic_config__: ClassVar[ConfigDict] = records.RECORD_CONFIG

    run_uid: Annotated[str, Field(pattern=_NAME.pattern)]
    attempt: Count
    cluster: Annotated[str, Field(pattern=_NAME.pattern)]
    incarnation: Incarnation
    created_at: AwareDatetime
    version: Literal[1] = 1


_CLAIM = TypeAdapter(Claim)


def write_claim(run: RunDirectory, claim: Claim) -> None:
    """Grant ``claim``, durably; asking again with the same incarnation is fine.

    Raises:
        ClaimTakenError: another incarnation holds it.
        UnsafePathError: a name that cannot be in a file's name.
        DamagedFileError: the claim that is there cannot be read.
    """
    for text in (claim.run_uid, claim.cluster):
        if not _NAME.match(text):
            raise UnsafePathError(f"{text!r} is not a name of letters, digits, '.' and '-'")
    path = run.claims / f"{claim.run_uid}-{claim.attempt}-{claim.cluster}.json"
    atomic.make_directory(run.claims)
    try:
        atomic.write_exclusive(path, records.encode(_CLAIM, claim))
    except FileExistsError:
        holder = records.read(_CLAIM, path).incarnation
        if holder != claim.incarnation:
            raise ClaimTakenError(claim.attempt, claim.cluster, holder) from None


def renew_claim(
    run: RunDirectory, claim: Claim, before: str, gate: Callable[[], None] = lambda: None
) -> None:
    """Give the claim that incarnation ``before`` holds to its successor, durably.

    Asking again for the same successor is fine.

    Args:
        gate: called right before the file is replaced; its exception prevents that.

    Raises:
        ClaimTakenError: another incarnation holds it.
        DamagedFileError: the claim that is there cannot be read.
        OSError: it is not known whether it was given; ask again.
    """
    path = run.claims / f"{claim.run_uid}-{claim.attempt}-{claim.cluster}.json"
    holder = records.read(_CLAIM, path).incarnation
    if holder == claim.incarnation:
        return
    if holder != before:
        raise ClaimTakenError(claim.attempt, claim.cluster, holder)
    atomic.write_bytes(path, records.encode(_CLAIM, claim), gate)


def is_claim(name: str) -> bool:
    """Whether a file of that name in `RunDirectory.claims` is one; an editor's or NFS's is not."""
    return _FILE.fullmatch(name) is not None


def read_claims(run: RunDirectory, run_uid: str) -> list[Claim]:
    """Every claim of this run, oldest attempt first. Raises `DamagedFileError`."""
    mine = [claim for claim in all_claims(run) if claim.run_uid == run_uid]
    return sorted(mine, key=lambda claim: (claim.attempt, claim.cluster))


def runs_of(run: RunDirectory, incarnations: Container[str]) -> set[str]:
    """Uids of the runs that these incarnations are of. Raises `DamagedFileError`."""
    return {claim.run_uid for claim in all_claims(run) if claim.incarnation in incarnations}


def all_claims(run: RunDirectory) -> list[Claim]:
    """Every claim in the directory, in no order. Raises `DamagedFileError`."""
    try:
        paths = [path for path in run.claims.iterdir() if is_claim(path.name)]
    except FileNotFoundError:
        return []
    return [records.read(_CLAIM, path) for path in paths]


def next_attempt(run: RunDirectory, run_uid: str = LOCAL_UID) -> int:
    """One more than the last claimed attempt; 0 when none was. For runs without an operator."""
    claims = read_claims(run, run_uid)
    return claims[-1].attempt + 1 if claims else 0
