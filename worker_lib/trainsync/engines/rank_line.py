"""What trainer ranks say to each other beside the collectives of training, with a deadline."""

import threading
from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Final

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore

from trainsync.engines.errors import TrainerRankFailedError

_TEXT_BYTES: Final = 1023  # of a problem's description; the rest is cut off
_FAILED: Final = 1

_made: Counter[tuple[int, ...]] = Counter()  # lines of each set of ranks, the same on all of them


class RankLine:
    """A gloo group of its own, for small messages. Its ranks make it, and use it, in one order.

    After a `TrainerRankFailedError` that says that a rank is gone it is of no more use.

    Args:
        seconds: bound of making the group, and of everything that is given a longer one.
        group: of the ranks that make it; None: all ranks of the default group.

    Attributes:
        rank: of this process in the group; the same numbers are in what is raised.
        root: rank 0 of the group, as the default group numbers it.

    Raises:
        ValueError: this rank is not of the group.
    """

    def __init__(self, seconds: float, group: Any = None) -> None:
        ranks = ranks_of(group)
        self.rank: int = ranks.index(dist.get_rank()) if len(ranks) > 1 else 0
        self.world_size: int = len(ranks)
        self.root: int = ranks[0]
        self._registered = group is None
        self._group: Any = None
        limit = timedelta(seconds=seconds)
        if len(ranks) > 1 and group is None:
            self._group = dist.new_group(backend="gloo", timeout=limit)
        elif len(ranks) > 1:
            self._group = _group_of(ranks, self.rank, limit)

    def say(self, word: int) -> "Word":
        """Rank 0 tells the others ``word`` (0 to 255); waits for nobody."""
        return Word(self._group, word)

    def listen(self) -> "Word":
        """On the other ranks: what rank 0 says next; waits for nobody."""
        return Word(self._group, 0)

    def decide(self, choose: Callable[[], int], seconds: float, doing: str) -> int:
        """What ``choose`` gives on rank 0 (0 to 255), on every rank.

        Args:
            choose: called on rank 0 alone, which may take its time; then it counts in ``seconds``.

        Raises:
            TrainerRankFailedError: ``choose`` raised on rank 0, or a rank did not come.
            Exception: on rank 0, what ``choose`` raised.
        """
        word, problem = 0, None
        if self.rank == 0:
            try:
                word = choose()
            except Exception as error:  # noqa: BLE001 - raised by `agree`, here and there
                problem = error
        word = Word(self._group, word).get(seconds, doing)
        self.agree(problem, seconds, doing)
        return word

    def agree(self, problem: BaseException | None, seconds: float, doing: str) -> None:
        """Go on together, or not at all: every rank comes, and none has a problem.

        Args:
            problem: what went wrong on this rank.
            seconds: how long to wait for the others.
            doing: for the message, such as "publishing version 3".

        Raises:
            TrainerRankFailedError: another rank has a problem, or did not come.
            BaseException: this rank's own ``problem``; its notes say what the others have.
        """
        row = _row(problem)
        rows = [torch.empty_like(row) for _ in range(self.world_size)]
        try:
            if self._group is not None:
                _wait(self._group.allgather([rows], [row]), seconds, doing)
        except TrainerRankFailedError as error:
            if problem is None:
                raise
            problem.add_note(str(error))
            raise problem from None
        failed = [
            f"rank {rank}: {_text(row)}"
            for rank, row in enumerate(rows)
            if rank != self.rank and row[0] == _FAILED
        ]
        text = f"{doing} failed on {', and on '.join(failed)}"
        if problem is not None:
            if failed:
                problem.add_note(text)
            raise problem
        if failed:
            raise TrainerRankFailedError(text)

    def close(self) -> None:
        """Give the group up, at once; the other ranks need not come."""
        group, self._group = self._group, None
        if group is None:
            return
        if self._registered:
            dist.destroy_process_group(group)
        holder = [group]
        del group
        # The destructor waits for what was begun and did not come through.
        threading.Thread(target=holder.clear, name="trainsync-close-line", daemon=True).start()


class Word:
    """A word of rank 0 on its way to the other ranks."""

    def __init__(self, group: Any, word: int) -> None:
        self._data = torch.tensor([word], dtype=torch.uint8)
        self._work = None
        if group is not None:
            options = dist.BroadcastOptions()
            options.rootRank, options.rootTensor = 0, 0
            self._work = group.broadcast([self._data], options)

    @property
    def over(self) -> bool:
        """Whether `get` would not wait."""
        return self._work is None or self._work.is_completed()

    def get(self, seconds: float, doing: str) -> int:
        """The word.

        Raises:
            TrainerRankFailedError: it did not come through in ``seconds``.
        """
        if self._work is not None:
            _wait(self._work, seconds, doing)
        return int(self._data.item())


def ranks_of(group: Any) -> tuple[int, ...]:
    """The ranks of ``group``, as the default group numbers them; (0,) without torch.distributed.

    Args:
        group: of torch.distributed; None: the default one.

    Raises:
        ValueError: this rank is not of the group, or there is no torch.distributed.
    """
    if not (dist.is_available() and dist.is_initialized()):
        if group is not None:
            raise ValueError("a process group was given before torch.distributed was initialized")
        return (0,)
    if group is None:
        return tuple(range(dist.get_world_size()))
    if dist.get_rank(group) < 0:
        raise ValueError(
            f"rank {dist.get_rank()} is not of the process group that was given; expected a call "
            "on the group's own ranks alone"
        )
    return tuple(dist.get_process_group_ranks(group))


def _group_of(ranks: tuple[int, ...], rank: int, limit: timedelta) -> Any:
    """A group that torch's list of groups does not have: one in the list changes the names of those
    that come later, on these ranks and not on the others, which then do not find one another."""
    _made[ranks] += 1
    name = f"trainsync-line/{'-'.join(map(str, ranks))}/{_made[ranks]}"
    store = PrefixStore(name, dist.distributed_c10d._get_default_store())
    return dist.ProcessGroupGloo(store, rank, len(ranks), limit)


def _wait(work: Any, seconds: float, doing: str) -> None:
    try:
        work.wait(timedelta(seconds=seconds))
    except RuntimeError as error:  # of gloo: a connection that ended, or the time
        raise TrainerRankFailedError(
            f"{doing} failed: a trainer rank is gone, or came not within {seconds:.3g} s ({error})"
        ) from error


def _row(problem: BaseException | None) -> torch.Tensor:
    # Ray's text of what an actor raised is a traceback, of which the end would be cut off.
    said = getattr(problem, "cause", None) or problem
    text = b"" if problem is None else f"{type(said).__name__}: {said}".encode()
    data = bytes([0 if problem is None else _FAILED]) + text[:_TEXT_BYTES]
    return torch.frombuffer(bytearray(data.ljust(1 + _TEXT_BYTES, b"\0")), dtype=torch.uint8)


def _text(row: torch.Tensor) -> str:
    return row[1:].numpy().tobytes().rstrip(b"\0").decode(errors="replace")
