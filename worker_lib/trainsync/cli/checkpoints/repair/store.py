"""``trainsync checkpoints repair`` of a store."""

from datetime import UTC, datetime

from trainsync.cli.checkpoints.repair.actions import carry_out
from trainsync.cli.output.progress import bytes_bar
from trainsync.storage.inspect.repair import Action
from trainsync.storage.objects import removal, repair
from trainsync.storage.objects.bucket import ObjectBucket
from trainsync.storage.objects.probe import require_conditional_puts


def repair_store(
    bucket: ObjectBucket, *, dry_run: bool, with_digest: bool, threads: int, quiet: bool
) -> tuple[list[Action], tuple[str, ...]]:
    """What was done, and a sentence for each pointer that cannot be repaired.

    Raises:
        StorageError: the store refuses, or cannot be reached.
    """
    with bytes_bar("reading", None) as tell:
        plan = repair.plan_saves(bucket, with_digest=with_digest, threads=threads, on_bytes=tell)
    if plan.actions and not dry_run:
        require_conditional_puts(bucket)
    done = []
    for action in plan.actions:
        done += carry_out(action, dry_run=dry_run, quiet=quiet)

    def clock() -> datetime:
        # The store tells its time by a put, and a dry run puts nothing: this machine's is near.
        return datetime.now(UTC) if dry_run else removal.store_time(bucket)

    for action in repair.plan_cleanup(bucket, clock):
        done += carry_out(action, dry_run=dry_run, quiet=quiet)
    return done, plan.refused
