"""Ranks go on together or fail together, and no rank waits for one that failed or is gone.

Not by a collective, in which a rank that failed or died would leave the others. Ranks write into
the store of the process group, and each waits for the others with a deadline of its own, and hears
of ranks whose heartbeat has stopped (`trainsync.dist.heartbeat`).
"""

import json
import logging
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final, Protocol

from trainsync.dist.errors import PeerError, PeerLostError
from trainsync.dist.rank_zero_number import RankZeroNumber
from trainsync.dist.store import GroupStore

logger = logging.getLogger(__name__)

_FIRST_POLL: Final = 0.001  # seconds between two looks, which are then fewer and fewer
_LONGEST_POLL: Final = 0.2
_POLL_PER_RANK: Final = 0.0005  # all ranks ask one store
_LOST_POLL: Final = 0.5
_SHOWN: Final = 5
_MAX_TEXT: Final = 4096  # characters of a problem
_LATE_SECONDS: Final = 1.0  # rank 0, that gives up after its time, is heard by those in time
LINGER_SECONDS: Final = 5.0
"""Rank 0 often hosts the store: it does not end before others have read, or so long after."""

_Answer = dict[str, Any]


class LostRanks(Protocol):
    """Says which ranks are gone: a `Heartbeat`."""

    def lost(self) -> dict[int, str]: ...


class _RankLostError(Exception):
    def __init__(self, ranks: dict[int, str]) -> None:
        super().__init__("; ".join(f"rank {rank}: is gone: {ranks[rank]}" for rank in ranks))
        self.ranks = ranks


class Agreement:
    """Rounds in which each rank says how its work went; all ranks use it in the same order.

    Args:
        store: the ranks' own; None for a single rank.
        timeout: seconds for which rank 0 waits for the others in `do`; no deadline is longer.
        purpose: agreements of different purposes are apart from one another.
        grace: the deadline of the other ranks, as a multiple of that of rank 0.
        failed, gone: what is raised when another rank failed, or is gone.
        lost: None: a rank that is gone is noticed only when the time is over.
        root: the default process group's number of rank 0.
        clock, sleep: of monotonic seconds.

    Raises:
        PeerLostError: the store is gone.
    """

    def __init__(
        self,
        store: GroupStore | None,
        rank: int,
        world_size: int,
        timeout: float,
        *,
        purpose: str = "load",
        grace: float = 2.0,
        failed: type[PeerError] = PeerError,
        gone: type[PeerLostError] = PeerLostError,
        lost: LostRanks | None = None,
        root: int = 0,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.rank = rank
        self.world_size = world_size
        self.root = root
        self._store = store
        self._timeout = timeout
        self._grace = grace
        self._failed = failed
        self._gone = gone
        self._lost = lost
        self._clock = clock
        self._sleep = sleep
        self._longest = min(_LONGEST_POLL, 0.01 + _POLL_PER_RANK * world_size)
        self._round = self._words = 0
        self._prefix = ""
        if store is not None:
            # Counted in the store, so that ranks of a new group begin at one like the others.
            try:
                number = store.add(f"trainsync/{purpose}/{rank}", 1)
            except RuntimeError as error:
                raise store_gone(f"beginning to {purpose}", error, gone) from error
            self._prefix = f"trainsync/{purpose}/{number}"

    def do(self, what: str, work: Callable[[], str]) -> list[str]:
        """Do ``work`` on every rank; returns all ranks' results, by rank, when all succeeded.

        Raises:
            PeerError: another rank failed, or said nothing in time; names it and its cause.
            PeerLostError: another rank is gone.
            What ``work`` raises, on the rank that it failed on, at once.
        """
        value, problem = "", None
        try:
            value = work()
        except BaseException as error:  # noqa: BLE001 - raised by `agree`
            problem = error
        return self.agree(value, problem, what, self._timeout, hears_others=False)

    def agree(
        self,
        value: str,
        problem: BaseException | None,
        doing: str,
        seconds: float,
        *,
        hears_others: bool = True,
    ) -> list[str]:
        """Every rank's ``value``, by rank, if no rank has a problem.

        Args:
            problem: what went wrong on this rank.
            doing: for the message, such as "saving step 3".
            seconds: how long rank 0 waits for the others.
            hears_others: whether a rank with a problem waits for the others, whose problems are
                then notes on its own.

        Raises:
            PeerError: another rank has a problem, or said nothing in time, and this one has none.
            PeerLostError: another rank is gone.
            BaseException: this rank's own ``problem``.
        """
        if self._store is None:
            if problem is not None:
                raise problem
            return [value]
        seconds = min(seconds, self._timeout)
        self._round += 1
        mine = {"value": value} if problem is None else {"error": describe(problem)}
        try:
            answers = self._exchange(self._store, mine, doing, seconds, hears_others)
            self._raise_failed(answers, doing)
        except PeerError as error:
            if problem is None:
                raise
            problem.add_note(str(error))
        if problem is not None:
            raise problem
        return [answer["value"] for answer in answers]

    def say(self, word: int) -> RankZeroNumber:
        """Rank 0 tells the others ``word``, without waiting; `agree` comes before the next word."""
        self._words += 1
        if self._store is None:
            return RankZeroNumber(lambda wait: word)
        self._write(self._store, "word", {"round": self._words, "word": word}, "telling the ranks")
        return RankZeroNumber(lambda wait: word)

    def listen(self) -> RankZeroNumber:
        """On the other ranks: what rank 0 says next; does not wait."""
        self._words += 1
        number, store = self._words, self._store
        assert store is not None, "a single rank is rank 0"

        def ask(wait: tuple[float, str] | None) -> int | None:
            seconds, doing = wait or (0.0, "")
            end = self._clock() + seconds
            try:
                answer = self._await(store, "word", number, doing, end, needs=0)
            except _RankLostError as error:
                raise self._gone(f"{doing} failed on {error}") from None
            if answer is None and wait is not None:
                raise self._failed(f"{doing} failed on rank 0: it said nothing in {seconds:.3g} s")
            return None if answer is None else int(answer["word"])

        return RankZeroNumber(ask)

    def decide(self, choose: Callable[[], int], doing: str, seconds: float) -> int:
        """Return rank 0's ``choose()`` on every rank.

        Args:
            choose: called on rank 0 alone; its time counts against the other ranks' ``seconds``.

        Raises:
            PeerError: ``choose`` raised on rank 0, or a rank missed the deadline.
            Exception: on rank 0, the error of ``choose``.
        """
        word, problem = 0, None
        if self.rank == 0:
            try:
                word = choose()
            except Exception as error:  # noqa: BLE001 - raised by `agree`, on every rank
                problem = error
            self.say(word)
        else:
            word = self.listen().get(min(seconds, self._timeout), doing)
        self.agree("", problem, doing, seconds)
        return word

    # -- inside -----------------------------------------------------------------------------

    def _raise_failed(self, answers: list[_Answer], doing: str) -> None:
        # A rank's own problem is raised as it is.
        failed = [
            (rank, answer)
            for rank, answer in enumerate(answers)
            if "error" in answer and (rank != self.rank or "silent" in answer)
        ]
        if not failed:
            return
        shown = "; ".join(f"rank {rank}: {answer['error']}" for rank, answer in failed[:_SHOWN])
        more = f"; and {len(failed) - _SHOWN} more ranks" if len(failed) > _SHOWN else ""
        is_gone = any("lost" in answer for _, answer in failed)
        raise (self._gone if is_gone else self._failed)(f"{doing} failed on {shown}{more}")

    def _exchange(
        self, store: GroupStore, mine: _Answer, doing: str, seconds: float, hears_others: bool
    ) -> list[_Answer]:
        self._write(store, str(self.rank), mine | {"round": self._round}, doing)
        alone = "error" in mine and not hears_others
        if self.rank == 0:
            answers = [mine] if alone else self._collect(store, mine, doing, seconds)
            self._publish(store, answers, doing, seconds)
            return answers
        if alone:
            self._note_read(store)
            return []
        seconds = self._grace * seconds + _LATE_SECONDS
        try:
            end = self._clock() + seconds
            conclusion = self._await(store, "all", self._round, doing, end, needs=0)
        except _RankLostError as error:
            self._note_read(store)
            raise self._gone(f"{doing} failed on {error}") from None
        if conclusion is None:
            raise self._failed(f"{doing}: rank 0 said nothing within {seconds:g} s")
        self._note_read(store)
        answers = conclusion["answers"]
        return list(answers)

    def _collect(
        self, store: GroupStore, mine: _Answer, doing: str, seconds: float
    ) -> list[_Answer]:
        """Rank 0: what the others say. A rank that is gone ends it at once."""
        end = self._clock() + seconds
        answers = [mine]
        lost: dict[int, str] = {}
        for rank in range(1, self.world_size):
            try:
                answer = self._await(store, str(rank), self._round, doing, end, needs=rank)
            except _RankLostError as error:
                lost = error.ranks
                answer, end = None, self._clock()  # of the others only what is there by now
            answers.append({"silent": True} if answer is None else answer)
        for rank, said in enumerate(answers):
            if "silent" in said and rank in lost:
                said.update(error=f"is gone: {lost[rank]}", lost=True)
            elif "silent" in said and not lost:
                said.update(error=f"said nothing within {seconds:g} s")
        return answers

    def _publish(
        self, store: GroupStore, answers: list[_Answer], doing: str, seconds: float
    ) -> None:
        self._write(store, "all", {"round": self._round, "answers": answers}, doing)
        silent = sum("silent" in answer for answer in answers)
        readers = self.world_size - 1 - silent
        end = self._clock() + min(seconds, LINGER_SECONDS)
        try:
            while store.add(self._read_key, 0) < readers and self._clock() < end:
                self._sleep(_FIRST_POLL)
            store.delete_key(self._read_key)
        except RuntimeError as error:
            raise store_gone(doing, error, self._gone) from error

    @property
    def _read_key(self) -> str:
        return f"{self._prefix}/read/{self._round}"

    def _note_read(self, store: GroupStore) -> None:
        """Rank 0 may go on, and end."""
        with suppress(RuntimeError):  # it has ended
            store.add(self._read_key, 1)

    def _await(
        self, store: GroupStore, key: str, number: int, doing: str, end: float, *, needs: int
    ) -> _Answer | None:
        """The word under ``key`` in round ``number``; None when it is not there at ``end``.

        Args:
            needs: the rank that writes it; a rank that is gone is not waited for.

        Raises:
            _RankLostError: that rank, or one that has not answered in this round, is gone.
            PeerError: rank 0 has gone on without this rank; or the store is gone.
        """
        # Polled: a blocking wait would keep the store from all other requests of this process.
        pause, asked = _FIRST_POLL, self._clock()
        while True:
            answer = self._read(store, key, doing)
            if answer is not None and answer["round"] == number:
                return answer
            if answer is not None and answer["round"] > number:
                raise self._failed(f"{doing}: rank {needs} went on without rank {self.rank}")
            now = self._clock()
            if now - asked >= _LOST_POLL:
                asked, lost = now, self._awaited_and_lost(store, doing, needs)
                # Looked at again: a rank that has ended may have written it just before.
                if lost and not self._has(store, key, number):
                    raise _RankLostError(lost)
            if now >= end:
                return None
            self._sleep(min(pause, end - now))
            pause = min(2 * pause, self._longest)

    def _awaited_and_lost(self, store: GroupStore, doing: str, needs: int) -> dict[int, str]:
        try:
            lost = {} if self._lost is None else self._lost.lost()
        except RuntimeError as error:
            raise store_gone(doing, error, self._gone) from error
        return {
            rank: cause
            for rank, cause in lost.items()
            if rank == needs or not self._has(store, str(rank), self._round)
        }

    def _has(self, store: GroupStore, key: str, number: int) -> bool:
        answer = self._read(store, key, "")
        return answer is not None and answer["round"] >= number

    def _read(self, store: GroupStore, key: str, doing: str) -> _Answer | None:
        key = f"{self._prefix}/{key}"
        try:
            if not store.check([key]):
                return None
            answer: _Answer = json.loads(store.get(key))
        except RuntimeError as error:
            raise store_gone(doing, error, self._gone) from error
        return answer

    def _write(self, store: GroupStore, key: str, answer: _Answer, doing: str) -> None:
        try:
            store.set(f"{self._prefix}/{key}", json.dumps(answer))
        except RuntimeError as error:
            raise store_gone(doing, error, self._gone) from error


def describe(problem: BaseException) -> str:
    """An error in one line, for other ranks; without the traceback of a Ray actor."""
    said = getattr(problem, "cause", None) or problem
    return f"{type(said).__name__}: {said}"[:_MAX_TEXT]


def store_gone(
    doing: str, error: RuntimeError, gone: type[PeerLostError] = PeerLostError
) -> PeerLostError:
    """The error of a rank that cannot reach the store of the process group."""
    return gone(
        f"{doing}: the store of the process group is gone (its host, mostly rank 0, ended?): "
        f"{error}"
    )
