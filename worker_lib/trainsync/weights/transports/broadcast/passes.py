"""One broadcast: passes over the explorers that are behind, until none is."""

import logging
import time
from collections.abc import Sequence
from typing import Final

from trainsync.failpoints import failpoint
from trainsync.weights.buckets.device_digest import held_to, is_of_device
from trainsync.weights.buckets.layout import StreamSchema
from trainsync.weights.buckets.tensor_stream import SchemaChangedError
from trainsync.weights.errors import (
    GroupFailedError,
    InconsistentUploadError,
    SupersededTrainerError,
)
from trainsync.weights.transports.broadcast.deadlines import BroadcastProgress, Deadlines
from trainsync.weights.transports.broadcast.link import Frame
from trainsync.weights.transports.broadcast.members import Member, Members
from trainsync.weights.transports.broadcast.transport_selector import TransportSelector

logger = logging.getLogger(__name__)

_MAX_PASSES: Final = 8  # of one broadcast, without those in which a member was lost
_MAX_LOSSES: Final = 2  # of one explorer in one broadcast; it may come back with the next one
_SLOWEST_CHECK: Final = 100e6  # bytes a second; a machine that is not overloaded does 10 GB


class BroadcastPasses:
    """Prepares the explorers, has the version sent to them, and lets them serve it.

    Args:
        transports: choose how the bytes travel.
    """

    def __init__(
        self,
        members: Members,
        transports: TransportSelector,
        deadlines: Deadlines,
    ) -> None:
        self._members = members
        self._transports = transports
        self._deadlines = deadlines
        self._schema: StreamSchema | None = None
        self._also: dict[str, list[str]] = {}  # further names of tied weights

    @property
    def bytes(self) -> int:
        """Size of the version that was sent last."""
        return 0 if self._schema is None else self._schema.total

    def run(self, progress: BroadcastProgress) -> None:
        """Pass until every explorer that can be served is; notes the outcome in ``progress``.

        Raises:
            SupersededTrainerError: an explorer follows a newer attempt.
            UnsupportedWeightsError, InconsistentUploadError: of the tensors.
        """
        again = progress.digest is not None
        self._transports.begin(progress)
        try:
            self._passes(progress)
        finally:
            self._transports.end(progress, again=again)

    def _passes(self, progress: BroadcastProgress) -> None:
        trouble = "the deadline had passed"
        if progress.digest is not None and is_of_device(progress.digest):
            progress.tensors = held_to(progress.tensors, progress.digest)
        while behind := self._behind(progress):
            most = _MAX_PASSES + self._transports.more_passes
            if progress.passes - progress.lossy >= most or progress.deadline <= time.monotonic():
                for member in behind:
                    self._lose(
                        progress, member, f"version {progress.version} could not be sent: {trouble}"
                    )
                return
            self._transports.begin_pass()
            passes, losses = progress.passes, progress.losses.total()
            try:
                if self._transports.copies_first(progress):
                    self._schema = self._transports.copy(progress)
                if self._schema is None:
                    self._schema = self._transports.schema(progress)
                    progress.described = True
                self._one_pass(progress, behind, self._schema)
            except GroupFailedError as error:
                trouble = str(error)
                logger.warning("version %d is sent again: %s", progress.version, trouble)
                self._transports.leave()
                self._lose_to_blame(progress, trouble)
            except SchemaChangedError as error:
                self._transports.leave()
                schema, self._schema = self._schema, None
                if schema is not None and schema == progress.seen:
                    raise InconsistentUploadError(
                        f"version {progress.version}: tensors change from call to call: {error}"
                    ) from error
                if progress.described:
                    progress.describe = lambda: None  # the description was wrong
                progress.refused.clear()  # they refused another schema
            except BaseException:
                self._transports.leave()
                raise
            finally:
                self._note_lost(progress, behind)
            if progress.passes > passes and progress.losses.total() > losses:
                progress.lossy += 1
        self._check_superseded()

    def _one_pass(
        self, progress: BroadcastProgress, behind: Sequence[Member], schema: StreamSchema
    ) -> None:
        answers = self._prepare(progress, behind, schema)
        ready = tuple(answers)
        refused = progress.refused and not progress.described
        if refused or (ready and self._transports.copies_for_nobody(progress, ready)):
            self._check_schema(progress, schema)
        if not ready:
            return
        failpoint("send.prepared")
        progress.passes += 1
        delivery = self._transports.send(progress, answers, schema)
        if delivery is None:
            return
        failpoint("send.sent")
        if progress.digest is None:
            progress.digest = delivery.digest
            if delivery.by_group:  # another way has a digest of its own: these must be the same
                progress.tensors = held_to(progress.tensors, delivery.digest)
        elif delivery.digest != progress.digest and not is_of_device(progress.digest):
            raise InconsistentUploadError(
                f"version {progress.version} has {delivery.digest}, but had {progress.digest} "
                "when it was sent before"
            )
        self._commit(progress, delivery.members, progress.digest, delivery.digest)
        self._transports.succeed(progress, delivery)

    def _lose_to_blame(self, progress: BroadcastProgress, trouble: str) -> None:
        """Quarantine the member that fails in a chain of one; it may come back."""
        member = self._transports.blame()
        if member is not None:
            self._lose(
                progress, member, f"version {progress.version} does not get through: {trouble}"
            )
            progress.losses[member.name] = _MAX_LOSSES

    def _check_schema(self, progress: BroadcastProgress, schema: StreamSchema) -> None:
        """Check that the schema is that of these tensors, which were not looked at yet.

        Raises:
            SchemaChangedError: these tensors have another one.
        """
        if self._transports.has_delta:
            self._schema = found = self._transports.copy(progress)
        else:
            found = self._transports.schema(progress)
        if found != schema:
            raise SchemaChangedError("it has changed since the last version")
        progress.described = True

    def _behind(self, progress: BroadcastProgress) -> list[Member]:
        self._check_superseded()
        return [
            member
            for member in self._members.connected()
            if member.behind(self._members.attempt, progress.version)
            and (progress.only is None or member.name in progress.only)
            and member.name not in progress.refused
            and progress.losses[member.name] < _MAX_LOSSES
        ]

    def _check_superseded(self) -> None:
        newer = self._members.newer_attempt
        if newer is not None:
            raise SupersededTrainerError(
                f"the explorers follow attempt {newer}; this is attempt {self._members.attempt}"
            )

    def _prepare(
        self, progress: BroadcastProgress, behind: Sequence[Member], schema: StreamSchema
    ) -> dict[Member, Frame]:
        """The members that are ready to receive, with their answers.

        Each has the schema, and is out of any former collective.
        """
        if (described := progress.describe()) is not None:
            self._also = {name: list(others) for name, others in described.also.items()}
        offer = {
            "kind": "prepare",
            "version": progress.version,
            "schema_digest": schema.digest,
            "also": self._also,
        }
        text = schema.encode().decode()
        requests = {
            member: {
                **offer,
                **transports,
                **({} if member.schema == schema.digest else {"schema": text}),
            }
            for member, transports in self._transports.offers(progress, behind).items()
        }
        seconds = self._deadlines.bucket + self._deadlines.connect
        answers = self._members.ask(requests, min(seconds, progress.left()))
        for member, answer in answers.items():
            if answer["cause"] is None:
                member.schema = schema.digest
                self._transports.note_answer(member, answer)
            else:
                progress.refused[member.name] = str(answer["cause"])
        return {member: answer for member, answer in answers.items() if answer["cause"] is None}

    def _commit(
        self, progress: BroadcastProgress, ready: Sequence[Member], digest: str, arrived: str
    ) -> None:
        """Let the members that have all of the version serve it.

        Args:
            digest: of the version, as it is announced.
            arrived: digest of the bytes that were sent in this pass.
        """
        request = {
            "kind": "flip",
            "version": progress.version,
            "digest": digest,
            "arrived": arrived,
        }
        check = (
            self.bytes / _SLOWEST_CHECK
        )  # of the digest, by members that read from shared memory
        limit = self._deadlines.bucket + self._deadlines.connect + check
        seconds = min(limit, progress.left())
        failpoint("send.committed")
        answers = self._members.ask(dict.fromkeys(ready, request), seconds)
        for member, answer in answers.items():
            if answer["cause"] is None:
                member.attempt, member.version = self._members.attempt, progress.version
                progress.served.add(member.name)
                self._transports.note_served(member)
            elif not self._transports.try_another(progress, member, str(answer["cause"])):
                self._lose(progress, member, str(answer["cause"]))

    def _lose(self, progress: BroadcastProgress, member: Member, cause: str) -> None:
        self._members.quarantine(member, cause)
        progress.lost[member.name] = cause

    def _note_lost(self, progress: BroadcastProgress, members: Sequence[Member]) -> None:
        gone = self._members.quarantined()
        for member in members:
            if not self._members.here(member) and progress.losses[member.name] < _MAX_LOSSES:
                progress.losses[member.name] += 1
                progress.lost[member.name] = gone.get(member.name, "it connected again")
                self._transports.note_gone()
