"""Ranks that go on together or fail together: one that raises alone leaves the others waiting."""

from typing import TypeVar

import torch.distributed as dist

from trainsync.checkpoint.errors import CheckpointError

ValueT = TypeVar("ValueT")


class PeerFailedError(CheckpointError):
    """Another rank could not do its part; the message says which, and why."""


def agree(value: ValueT, problem: Exception | None, doing: str) -> list[ValueT]:
    """Every rank's ``value``, by rank, if no rank has a problem. All ranks call it together.

    Blocks as long as the process group allows.

    Args:
        value: plain data.
        problem: what went wrong on this rank.
        doing: for the message, such as "saving step 3".

    Raises:
        PeerFailedError: another rank has a problem, and this one has none.
        Exception: this rank's own ``problem``.
    """
    if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
        if problem is not None:
            raise problem
        return [value]
    text = None if problem is None else f"{type(problem).__name__}: {problem}"
    answers: list[tuple[str | None, ValueT] | None] = [None] * dist.get_world_size()
    dist.all_gather_object(answers, (text, value))
    if problem is not None:
        raise problem
    given = [answer for answer in answers if answer is not None]
    failed = [f"rank {rank}: {text}" for rank, (text, _) in enumerate(given) if text is not None]
    if failed:
        more = f" (and {len(failed) - 1} more ranks)" if len(failed) > 1 else ""
        raise PeerFailedError(f"{doing} failed on {failed[0]}{more}")
    return [value for _, value in given]
