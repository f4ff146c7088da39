"""Claims: an attempt is granted to one incarnation, once and durably."""

import logging
from collections.abc import Callable
from datetime import datetime

from trainsync.monitor import errors
from trainsync.monitor.commit.executor import SaveExecutor
from trainsync.monitor.ledger.saves import SaveOwner
from trainsync.storage.errors import ClaimTakenError
from trainsync.storage.layout import RunDirectory
from trainsync.storage.saves import claims

_LOG = logging.getLogger(__name__)


def claim(
    run: RunDirectory,
    worker: SaveExecutor,
    owner: SaveOwner,
    cluster: str,
    confirmed_attempt: int | None,
    *,
    run_uid: str,
    clock: Callable[[], datetime],
    gate: Callable[[], None],
) -> bool:
    """Grant the attempt to this incarnation, durably, or refuse for ever; whether it begins.

    Complete saves of the attempt before are committed first; its other saves are superseded.

    Args:
        confirmed_attempt: ``status.attempt`` of the run; None where there is no Kubernetes.
        gate: called right before the claim is written; its exception prevents that.

    Raises:
        NotYetError: the run is not known to have come to this attempt.
        ClaimRefusedError: a newer attempt is in force, or another incarnation has this one.
        OSError, StorageError: not granted; ask again.
    """
    in_force = worker.ledger.attempt
    _check(owner.attempt, confirmed_attempt, in_force)
    begins = owner.attempt != in_force
    if begins:
        worker.settle(clock())
    gate()
    try:
        claims.write_claim(
            run,
            claims.Claim(
                run_uid=run_uid,
                attempt=owner.attempt,
                cluster=cluster,
                incarnation=owner.incarnation,
                created_at=clock(),
            ),
        )
    except ClaimTakenError as error:
        raise errors.ClaimRefusedError(str(error)) from error
    worker.grant(cluster, owner)
    _LOG.info("attempt %d of cluster %s claimed by %s", owner.attempt, cluster, owner)
    return begins


def renew(
    run: RunDirectory,
    worker: SaveExecutor,
    owner: SaveOwner,
    successor: SaveOwner,
    *,
    run_uid: str,
    clock: Callable[[], datetime],
    gate: Callable[[], None],
) -> None:
    """Give the attempt of ``owner``, which is in force, to its successor, durably.

    As with a new attempt, complete saves are committed first; the open ones are aborted.

    Args:
        gate: called right before the claim is written; its exception prevents that.

    Raises:
        ClaimRefusedError: another incarnation has the attempt by now.
        OSError, StorageError: not given; ask again.
    """
    cluster = worker.ledger.cluster_of(owner)
    assert cluster is not None, "the owner is in force"
    worker.settle(clock())
    worker.abandon(owner, f"the attempt is restarted in place ({successor.restarts})", clock())
    try:
        claims.renew_claim(
            run,
            claims.Claim(
                run_uid=run_uid,
                attempt=owner.attempt,
                cluster=cluster,
                incarnation=successor.incarnation,
                created_at=clock(),
            ),
            owner.incarnation,
            gate,
        )
    except ClaimTakenError as error:
        raise errors.ClaimRefusedError(str(error)) from error
    worker.grant(cluster, successor)


def _check(attempt: int, confirmed: int | None, in_force: int | None) -> None:
    if confirmed is not None and attempt > confirmed:
        raise errors.NotYetError(f"attempt {attempt} is newer than attempt {confirmed} of the run")
    newest = max((n for n in (confirmed, in_force) if n is not None), default=attempt)
    if attempt < newest:
        raise errors.ClaimRefusedError(f"attempt {attempt} is over: the run is at attempt {newest}")
