"""Broadcast the weights of an FSDP engine: rank 0 sends, and every rank gathers along."""

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any, Final

from trainsync.engines.errors import GatherFailedError, TrainerRankFailedError
from trainsync.engines.publish.gather_ahead import GatherAhead, GatherAlong
from trainsync.engines.publish.group_broadcast import broadcast_in_group, is_process_group
from trainsync.engines.publish.model_update_group import ModelUpdateGroup
from trainsync.engines.publish.sent_tensors import described, sent_tensors
from trainsync.weights.buckets.tensor_stream import NamedTensors, Value
from trainsync.weights.transports.broadcast.broadcaster import BroadcastReport

# What rank 0 says to the others.
_PASS: Final = 1  # gather every weight along with me
_DONE: Final = 2
_FAILED: Final = 3

# More than a broadcaster may be late.
_LATE_SECONDS: Final = 5.0
# Between two looks at whether rank 0 speaks, while a rank gathers along.
_LOOK_SECONDS: Final = 0.02


def fsdp_sync_weight_nccl(
    engine: Any, model_update_group: Any, global_step: int | None = None
) -> BroadcastReport | None:
    """Broadcast the engine's weights as version ``global_step`` to every connected explorer.

    The last version again, with the same weights, is for explorers that have connected since.

    Every rank calls it. The weights are gathered one at a time, or of large ones a part of 4 MiB
    (see `sent_tensors`), the next while the last is on the wire, and once more for every pass that
    the broadcaster needs. Once every rank has come, within
    ``deadlines.whole``, it is over within ``deadlines.whole + deadlines.connect`` and 5 s more,
    also when a rank dies or stops; with a group of `ModelUpdateGroup.create` the time to wait for
    explorers and to tell them comes besides. The weights must not change before it returns.

    Args:
        engine: see `sent_tensors`.
        model_update_group: of `ModelUpdateGroup.create`; or a process group of torch whose rank 0
            is trainer rank 0 (other trainer ranks, which are no members, give None): see
            `broadcast_in_group`, which knows no versions.
        global_step: the same on all ranks; None: the version after the last one.

    Returns:
        On rank 0 how it went; an explorer that was lost is no error. None on the other ranks, and
        with a process group.

    Raises:
        TrainerRankFailedError: another rank failed, or is gone; says which, if it could say so.
        GatherFailedError: a weight could not be gathered on this rank.
        StaleVersionError, SupersededTrainerError, UnsupportedWeightsError: on rank 0, see
            `WeightBroadcaster.broadcast`.
        TypeError: ``model_update_group`` is neither, or a process group and there is a
            ``global_step``.
    """
    if not isinstance(model_update_group, ModelUpdateGroup):
        if not is_process_group(model_update_group):
            raise TypeError(
                f"model_update_group is a {type(model_update_group).__name__}; expected "
                "ModelUpdateGroup.create(ctx), or a process group of torch with trainer rank 0"
            )
        if global_step is not None:
            raise TypeError(
                f"global_step is {global_step}, and a process group knows no versions; expected "
                "ModelUpdateGroup.create(ctx) for versions, or no global_step"
            )
        broadcast_in_group(engine, model_update_group)
        return None
    started = time.monotonic()
    model_update_group.wait_ready(global_step)
    report = _broadcast(engine, model_update_group, global_step)
    model_update_group.announce(report, time.monotonic() - started)
    return report


def _broadcast(
    engine: Any, model_update_group: ModelUpdateGroup, global_step: int | None
) -> BroadcastReport | None:
    sync = _Sync(engine, model_update_group, global_step)
    broadcaster = model_update_group.broadcaster
    if broadcaster is None:
        sync.follow()
        return None
    version = broadcaster.version + 1 if global_step is None else global_step
    if version == broadcaster.version:
        return sync.lead(broadcaster.catch_up)
    return sync.lead(
        lambda tensors: broadcaster.broadcast(
            version, tensors, describe=lambda: described(engine, model_update_group.dtype)
        )
    )


class _Sync:
    """One broadcast."""

    def __init__(self, engine: Any, group: ModelUpdateGroup, version: int | None) -> None:
        self._engine = engine
        self._ranks = group.ranks
        self._dtype = group.dtype
        self._deadlines = group.deadlines
        self._doing = (
            f"publishing {'the next version' if version is None else f'version {version}'}"
        )
        self._gathered: GatherAhead[Value] | None = None
        self._ranks.agree(None, group.deadlines.whole, self._doing)
        late = group.deadlines.connect + _LATE_SECONDS
        self._end = time.monotonic() + group.deadlines.whole + late

    # -- rank 0 ---------------------------------------------------------------------------

    def lead(
        self, send: Callable[[Callable[[], NamedTensors]], BroadcastReport]
    ) -> BroadcastReport:
        """Let ``send`` have the weights as often as it asks for them."""
        try:
            report = send(self._gather_again)
            self._finish_pass()
        except TrainerRankFailedError:
            raise  # every rank that lives knows
        except BaseException as error:
            self._give_up(error)
            raise
        self._say(_DONE, None, self._left())
        return report

    def _gather_again(self) -> NamedTensors:
        self._finish_pass()
        self._say(_PASS, None, self._left())
        self._gathered = GatherAhead(self._gather, self._deadlines.bucket)
        self._gathered.begin(min(self._left(), self._deadlines.whole))
        return self._gathered

    def _finish_pass(self) -> None:
        """Let no rank wait in a pass that was left in the middle."""
        gathered, self._gathered = self._gathered, None
        if gathered is not None:
            gathered.drain(self._left())

    def _give_up(self, error: BaseException) -> None:
        with contextlib.suppress(GatherFailedError):  # then the others do not wait in it either
            self._finish_pass()
        try:
            self._say(_FAILED, error, self._deadlines.bucket)
        except TrainerRankFailedError as other:
            error.add_note(str(other))

    def _say(self, word: int, problem: BaseException | None, seconds: float) -> None:
        self._ranks.say(word).get(seconds, self._doing)
        self._ranks.agree(problem, seconds, self._doing)

    # -- the other ranks ------------------------------------------------------------------

    def follow(self) -> None:
        """Gather along until rank 0 is done."""
        along: GatherAlong | None = None
        while True:
            word = self._hear(along)
            self._ranks.agree(None if along is None else along.problem, self._left(), self._doing)
            if word == _DONE:
                return
            along = GatherAlong(self._gather)

    def _hear(self, along: GatherAlong | None) -> int:
        coming = self._ranks.listen()
        if along is not None:
            while (
                not along.wait(_LOOK_SECONDS) and not coming.over and time.monotonic() < self._end
            ):
                pass
        word = coming.get(self._left(), self._doing)
        if along is not None and word != _FAILED and not along.wait(self._deadlines.bucket):
            raise GatherFailedError("rank 0 has gathered every weight, and this rank has not")
        return word

    # -- both -----------------------------------------------------------------------------

    def _gather(self) -> Iterator[tuple[str, Value]]:
        return sent_tensors(self._engine, self._dtype, self._ranks.root)

    def _left(self) -> float:
        return max(_LOOK_SECONDS, self._end - time.monotonic())
