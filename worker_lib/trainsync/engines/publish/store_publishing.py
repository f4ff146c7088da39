"""The method ``store``: all ranks gather, and rank 0 puts versions into a bucket."""

import logging
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import torch

from trainsync.engines.adapt import adapt
from trainsync.engines.publish.gathering import GatherAhead, GatherTogether
from trainsync.engines.publish.model_update_group import whole_tensors
from trainsync.engines.publish.proving import check_prover, proof_of
from trainsync.engines.publish.report import PublishReport
from trainsync.engines.trainer_ranks import trainer_ranks
from trainsync.storage.errors import DamagedFileError
from trainsync.storage.objects.errors import StoreError, StoreUnavailableError
from trainsync.weights.buckets.tensor_stream import Value
from trainsync.weights.delta.compiling import prepare
from trainsync.weights.errors import WeightsError, WeightsLateError, WeightsUnavailableError
from trainsync.weights.proof.asking import Prover
from trainsync.weights.proof.record import Proof, encode_proof
from trainsync.weights.synchronizer.roster import LOST, STOPPED
from trainsync.weights.transports.anchors.index import BUCKET_BYTES, Owner
from trainsync.weights.transports.anchors.publisher import AnchorPublisher, Stored
from trainsync.weights.transports.anchors.retention import Needed
from trainsync.weights.transports.broadcast.deadlines import Deadlines
from trainsync.weights.versions import Announcement, Published

if TYPE_CHECKING:
    from trainsync.runtime.context import RunContext

logger = logging.getLogger(__name__)

# The Synchronizer may have to be rebuilt before it answers.
_ANSWER_SECONDS: Final = 60.0
# Of the question which versions explorers serve; the answer before is good enough.
_ASK_SECONDS: Final = 10.0
_CLOSE_SECONDS: Final = 30.0
_COMPILE_SECONDS: Final = 60.0

_Gathered = Callable[[], GatherAhead[Value]]
_Outcome = Stored | str
"""What was published, or why nothing was."""


class StorePublishing:
    """One rank's part; every rank of the process group makes one, and calls it, together.

    Args:
        engine, dtype, group, prover: see `WeightPublisher`.

    Raises:
        TrainerRankFailedError: rank 0 could not; it raises the rest.
        WeightsUnavailableError: the store cannot be used, or the Synchronizer does not answer.
        SupersededTrainerError: a newer attempt publishes.
        SettingsError: the store cannot be opened.
        ValueError: the model cannot be asked for a proof.
    """

    def __init__(
        self,
        ctx: "RunContext",
        engine: Any,
        dtype: torch.dtype | None,
        group: Any,
        prover: Prover | None = None,
    ) -> None:
        self._engine = engine
        self._asked = adapt(engine)
        check_prover(prover, self._asked)
        self._prover = prover
        self._dtype = dtype
        self._timeout = ctx.sync.timeout
        self._deadlines = Deadlines.of(self._timeout, BUCKET_BYTES)
        longest = self._timeout + 2 * _ANSWER_SECONDS + _COMPILE_SECONDS
        self._ranks = trainer_ranks(longest, group)
        self._lead: _Lead | None = None

        def set_up() -> int:
            self._lead = _Lead(ctx)
            return 0

        self._ranks.decide(set_up, "opening the store of the weights", longest)

    def publish(self, step: int) -> PublishReport:
        """See `WeightPublisher.publish`."""
        proof = proof_of(self._prover, self._asked, step)
        started = time.monotonic()
        doing = f"publishing version {step}"
        together = GatherTogether(self._gather, self._ranks, self._deadlines, doing)
        outcome: _Outcome | None = None
        lead = self._lead
        if lead is None:
            together.follow()
        else:
            deadline = started + self._timeout
            outcome = together.lead(partial(lead.put, step, deadline, proof))

        def tell() -> int:
            if lead is not None and outcome is not None:
                lead.tell(step, outcome, time.monotonic() - started)
            return 0

        self._ranks.decide(tell, f"announcing version {step}", 2 * _ANSWER_SECONDS)
        seconds = time.monotonic() - started
        if outcome is None:
            return PublishReport(step, seconds, 0)
        if isinstance(outcome, str):
            return PublishReport(step, seconds, 0, aborted=outcome)
        delta_bytes = outcome.sent if outcome.delta else 0
        return PublishReport(step, seconds, outcome.sent, delta_bytes=delta_bytes)

    def close(self) -> None:
        """Let what is on its way into the store end. Versions stay there."""
        if self._lead is not None:
            self._lead.close()

    def _gather(self) -> Iterator[tuple[str, Value]]:
        return whole_tensors(self._engine, self._dtype, self._ranks.root)


class _Lead:
    """Rank 0's hold on the store and on the Synchronizer."""

    def __init__(self, ctx: "RunContext") -> None:
        # A publisher of another method may do without Ray.
        from trainsync.weights.synchronizer.connection import SynchronizerConnection

        place = ctx.sync.store
        assert place is not None, "read_settings has seen to it"
        assert ctx.incarnation is not None, "the attempt is claimed"
        self._connection = SynchronizerConnection(ctx.synchronizer(), _ANSWER_SECONDS)
        self._needed = Needed()
        self._asking = min(_ASK_SECONDS, ctx.sync.timeout / 4)
        owner = Owner(ctx.uid, ctx.attempt, ctx.incarnation)
        try:
            self._publisher = AnchorPublisher(
                place.open(ctx.sync.timeout), owner, needed=lambda: self._needed
            )
        except (StoreError, DamagedFileError) as error:
            raise WeightsUnavailableError(f"weights cannot be published: {error}") from error
        prepare(_COMPILE_SECONDS, compact=True)  # else the first delta misses its deadline

    def put(
        self, version: int, deadline: float, proof: Proof | None, gathered: _Gathered
    ) -> _Outcome:
        """Put a version; a string where the store is away, or the version not in time.

        Raises:
            WeightsUnavailableError: the store refuses. And as `AnchorPublisher.publish`.
        """
        self._ask()
        try:
            left = max(0.0, deadline - time.monotonic())
            data = None if proof is None else encode_proof(proof)
            return self._publisher.publish(version, gathered, left, data)
        except (WeightsLateError, StoreUnavailableError) as error:
            return str(error)
        except (StoreError, DamagedFileError) as error:
            raise WeightsUnavailableError(f"version {version}: {error}") from error

    def tell(self, version: int, outcome: _Outcome, seconds: float) -> None:
        """Announce what was published, or that it is not waited for.

        Raises:
            WeightsUnavailableError: the Synchronizer does not answer. And what it raises.
        """
        call = partial(self._connection.call, timeout=_ANSWER_SECONDS)
        if isinstance(outcome, str):
            logger.warning("version %d is not published: %s", version, outcome)
            call("note_aborted", version, outcome)
            return
        what = "a delta" if outcome.delta else "an anchor"
        done = "version %d: %s of %d bytes is in the store, in %.3f s"
        logger.info(done, version, what, outcome.sent, seconds)
        published = Published.stored(version, outcome.digest, outcome.bytes)
        call("announce", Announcement(published, seconds, again=True))

    def close(self) -> None:
        """See `AnchorPublisher.close`."""
        self._publisher.close(_CLOSE_SECONDS)

    def _ask(self) -> None:
        """Learn which versions explorers serve: they fold what came after."""
        try:
            status = self._connection.call("get_status", timeout=self._asking)
        except WeightsError as error:
            logger.warning("which versions explorers serve is not known anew: %s", error)
            return
        live = [one for one in status.explorers.values() if one.status not in (LOST, STOPPED)]
        self._needed = Needed(served=[one.version for one in live if one.version >= 0])
