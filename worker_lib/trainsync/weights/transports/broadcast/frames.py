"""The explorer's handling of the trainer's frames: prepare, receive, flip."""

import logging
import queue
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from trainsync.failpoints import failpoint
from trainsync.weights.buckets.layout import (
    StreamSchema,
    TensorMeta,
    differences,
    plan_buckets,
    under_names,
)
from trainsync.weights.buckets.served import ServedVersion, StagingSet, WeightSets
from trainsync.weights.delta.codec import Segment, apply
from trainsync.weights.errors import (
    DeltaError,
    GroupFailedError,
    MemberLostError,
    SchemaMismatchError,
    SharedMemoryError,
    StaleVersionError,
    WeightsError,
    WeightsUnavailableError,
)
from trainsync.weights.transports.broadcast.link import Frame, Link
from trainsync.weights.transports.chain.delta_wire import change
from trainsync.weights.transports.chain.receiving import ChainListener, ChainReceiver
from trainsync.weights.transports.process_group.receiving import GroupReceiver
from trainsync.weights.transports.shared_memory.receiving import SharedMemoryReceiver, Whole

logger = logging.getLogger(__name__)

Work = queue.SimpleQueue[tuple[Link, ChainListener, int, Frame] | None]
"""Frames in the order in which they came, with the trainer's link, the listener for the member
before and the trainer's attempt; None ends the work."""


@dataclass
class _Received:
    """A version that is here whole and not served yet."""

    attempt: int
    version: int
    digest: str
    staged: StagingSet
    base: str = ""  # digest of the version that ``delta`` was applied to
    delta: Sequence[Segment] = ()  # segments that came, of a version that came as a delta


class FrameHandler:
    """Handles the trainer's frames, one after the other, in a thread of its own (`run`).

    Args:
        expected: what the model takes; None: anything.
        note: called with the last error; with an empty text when all is well again.

    Attributes:
        refused: the version offered last, if the model does not take it, and what differs.
        sender: secret of the trainer that sent what is served. Versions of another one of the same
            attempt count anew: it may have gone on from an older step.
    """

    def __init__(
        self,
        name: str,
        sets: WeightSets,
        wire: ChainReceiver,
        same_host: SharedMemoryReceiver,
        group: GroupReceiver,
        expected: Sequence[TensorMeta] | None,
        note: Callable[[str], None],
    ) -> None:
        self._name = name
        self._sets = sets
        self._wire = wire
        self._same_host = same_host
        self._group = group
        self._expected = expected
        self._note = note
        self._schema: StreamSchema | None = None
        self._received: _Received | None = None
        self._flipped: _Received | None = None
        self._former: StagingSet | None = None
        self._trouble = ""
        self._also: Mapping[str, Sequence[str]] = {}
        self.refused: tuple[int, SchemaMismatchError] | None = None
        self.sender = ""

    @property
    def schema_digest(self) -> str | None:
        """Digest of the schema held here, which need not be sent again. Any thread."""
        schema = self._schema
        return None if schema is None else schema.digest

    def run(self, work: Work) -> None:
        """Handle frames until None comes."""
        while (item := work.get()) is not None:
            link, listener, attempt, frame = item
            if link.cause:
                continue  # the frame is of a connection that is gone
            try:
                self._handle(link, listener, attempt, frame, lambda: not work.empty())
            except MemberLostError:
                pass  # the thread of the link logs it
            except DeltaError as error:  # the answer to "flip" tells the trainer
                self._tell(str(error))
            except (GroupFailedError, SharedMemoryError) as error:
                self._tell(str(error))
                self._wire.leave()
            except Exception as error:  # the trainer must not wait for this explorer
                logger.exception("explorer %s cannot go on with this trainer", self._name)
                self._wire.leave()
                self._group.leave()
                link.close(f"{type(error).__name__}: {error}")
        self._wire.leave()
        self._group.leave()

    def _handle(
        self,
        link: Link,
        listener: ChainListener,
        attempt: int,
        frame: Frame,
        called: Callable[[], bool],
    ) -> None:
        kind = frame["kind"]
        if kind == "receive" and "group" in frame:
            self._receive_by_group(link, listener, attempt, frame, called)
            return
        if kind == "receive":
            self._receive(listener, attempt, frame)
            return
        if kind == "laid":
            self._take_laid(attempt, int(frame["version"]), self._same_host.take(frame))
            return
        if kind not in ("prepare", "flip"):
            raise ValueError(f"the trainer sent a frame of kind {kind!r}")
        cause: str | None = None
        seen: Frame = {}
        try:
            if kind == "prepare":
                seen = self._prepare(listener.token, attempt, frame)
            else:
                self._flip(attempt, frame)
                self.sender = listener.token
        except (WeightsError, MemoryError, RuntimeError) as error:  # torch's own "no memory"
            cause = str(error) or type(error).__name__
            self._tell(cause)
        answer = {
            "kind": "answer",
            "round": frame["round"],
            "cause": cause,
            **seen,
            "serves": self._sets.held,
        }
        if kind != "flip" or cause is not None:
            link.send(answer)
            return
        try:
            link.send(answer)
            failpoint("receive.acknowledged")
        finally:  # the new version is served, whether or not the trainer hears of it
            self._follow_up()

    def _prepare(self, sender: str, attempt: int, frame: Frame) -> Frame:
        """Make ready for a version; returns the transports that can bring it.

        ``group``: whether the process group can; ``memory``: the proof that the trainer's shared
        memory is seen here; ``delta``: false if a delta cannot be applied yet.
        """
        served = self._sets.served
        offered = (attempt, int(frame["version"]))
        anew = served is not None and served.attempt == attempt and self.sender != sender
        if served is not None and not anew and offered <= (served.attempt, served.version):
            raise StaleVersionError(
                f"version {offered[1]} of attempt {offered[0]} is offered after version "
                f"{served.version} of attempt {served.attempt}"
            )
        self._received = None
        self._same_host.drop()
        if "schema" in frame:
            schema = StreamSchema.decode(str(frame["schema"]).encode())
        elif self._schema is not None:
            schema = self._schema
        else:
            raise SchemaMismatchError("the schema did not come")
        if schema.digest != frame["schema_digest"]:
            raise SchemaMismatchError("the schema that came is not the one that was meant")
        also = _names(frame.get("also"))
        if self._expected is not None:
            wrong = differences(self._expected, under_names(schema.tensors, also, self._expected))
            if wrong is not None:
                told = SchemaMismatchError(f"version {offered[1]}: {wrong}")
                self.refused = offered[1], told
                raise SchemaMismatchError(wrong)
        self.refused = None
        self._schema, self._also = schema, also
        self._sets.keeps_base = bool(frame.get("delta"))
        # Allocate now: a lack of memory then holds up no other member.
        seen: Frame = {"group": bool(frame.get("group")) and self._stage_for_group(schema)}
        if not seen["group"]:
            seen["memory"] = self._same_host.probe(frame)
            if seen["memory"] is None:
                self._sets.stage(schema)
                if frame.get("delta"):  # not while others wait for a bucket
                    seen["delta"] = self._wire.ready_for_delta(wait=served is not None)
        failpoint("receive.prepared")
        return seen

    def _stage_for_group(self, schema: StreamSchema) -> bool:
        device = self._group.device
        if device is None:
            return False
        try:
            self._sets.stage(schema, device)
        except RuntimeError as error:  # torch's own "no memory"
            self._sets.forget_spare()
            logger.warning("explorer %s takes weights on the CPU: %s", self._name, error)
            return False
        return True

    def _receive_by_group(
        self,
        link: Link,
        listener: ChainListener,
        attempt: int,
        frame: Frame,
        called: Callable[[], bool],
    ) -> None:
        """Receive into the spare set on the device, and digest the bytes."""
        if self._schema is None or self._group.device is None:
            raise SchemaMismatchError("weights come before their schema, or to no device")
        staged = self._sets.stage(self._schema, self._group.device)
        staged.holds = None
        try:
            digest = self._group.receive(link, listener, frame, staged, called)
        except BaseException as error:
            self._group.leave()
            self._sets.forget_spare()  # the aborted collective may write to it for a moment longer
            if isinstance(error, RuntimeError):  # torch's own: no memory on the GPU, say
                raise GroupFailedError(str(error)) from error
            raise
        self._received = _Received(attempt, int(frame["version"]), digest, staged)
        failpoint("receive.received")

    def _receive(self, listener: ChainListener, attempt: int, frame: Frame) -> None:
        """Receive into the spare set, and digest the bytes."""
        if self._schema is None:
            raise SchemaMismatchError("weights come before their schema")
        version, base = int(frame["version"]), ""
        came: list[Segment] = []
        if "segment" in frame:
            self._take_laid(attempt, version, self._same_host.begin(frame, self._schema))
            return
        if "base" in frame:
            base, staged = str(frame["base"]), self._sets.copy_of_served()
            plan = plan_buckets(self._schema, int(frame["bucket_size"]))
            segments = _kept(self._wire.receive_delta(listener, frame, plan), came)
            if staged.holds != base or staged.schema != self._schema:
                for _ in segments:  # others are behind in the chain
                    pass
                raise DeltaError(f"version {version} starts from {base}, not {staged.holds}")
            digest = change(staged, segments, plan)
        else:
            staged = self._sets.stage(self._schema)
            staged.holds = None
            digest = self._wire.receive(listener, frame, staged)
        self._received = _Received(attempt, version, digest, staged, base, came)
        failpoint("receive.received")

    def _take_laid(self, attempt: int, version: int, whole: Whole | None) -> None:
        """Take a version from shared memory, when all of it is there."""
        if whole is not None:
            staged, digest = whole
            self._received = _Received(attempt, version, digest, staged)
            failpoint("receive.received")

    def _flip(self, attempt: int, frame: Frame) -> None:
        received, self._received = self._received, None
        version, digest = int(frame["version"]), str(frame["digest"])
        if received is None or (received.attempt, received.version) != (attempt, version):
            raise WeightsUnavailableError(f"version {version} is not here: {self._trouble}")
        if received.digest != frame["arrived"]:
            raise WeightsError(
                f"version {version} arrived with {received.digest}, expected {frame['arrived']}"
            )
        failpoint("receive.flipping")
        staged = received.staged
        tensors = self._under_all_names(staged.tensors)
        served = ServedVersion(attempt, version, digest, tensors, keepable=staged.ours)
        self._former = self._sets.flip(staged, served)
        self._flipped = received
        self._tell("")
        failpoint("receive.flipped")

    def _under_all_names(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The tensors; tied ones come under each of their names that is expected."""
        wanted = None if self._expected is None else {meta.name for meta in self._expected}
        named: dict[str, torch.Tensor] = {}
        for name, tensor in tensors.items():
            names = (name, *self._also.get(name, ()))
            named |= {one: tensor for one in names if wanted is None or one in wanted}
        return named

    def _follow_up(self) -> None:
        """Free the set that was served, or bring it to this version, after the answer."""
        self._former = None
        flipped, self._flipped = self._flipped, None
        if flipped is None or not flipped.base:
            return
        spare = self._sets.spare_of(flipped.base)
        if spare is not None:
            spare.holds = None
            for segment in flipped.delta:
                if segment.delta.size:
                    apply(segment.delta, spare.data.numpy())
            spare.holds = flipped.digest

    def _tell(self, trouble: str) -> None:
        self._trouble = trouble
        self._note(trouble)


def _names(said: object) -> dict[str, list[str]]:
    """Further names of tensors; older trainers send none.

    Raises:
        SchemaMismatchError: the frame has another type there.
    """
    if said is None:
        return {}
    if not isinstance(said, dict) or not all(
        isinstance(others, list) and all(isinstance(name, str) for name in others)
        for others in said.values()
    ):
        raise SchemaMismatchError("the names of tied tensors cannot be read")
    return said


def _kept(segments: Iterator[Segment], came: list[Segment]) -> Iterator[Segment]:
    """The same segments, which are appended to ``came``."""
    for segment in segments:
        came.append(segment)
        yield segment
