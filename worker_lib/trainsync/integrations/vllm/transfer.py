"""The engine in each worker of vLLM that loads staged weights.

One call of ``update_weights`` brings a whole version, that of a draft model with it: between calls
the model is always whole, so that a client which dies between any two leaves nothing half-done.
vLLM's layerwise reload does the loading, also of fused, tied, sharded and quantised weights.
"""

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

import torch
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.logger import init_logger

from trainsync.engines.errors import EngineUpdateError
from trainsync.engines.servers.errors import KEPT, TORN
from trainsync.engines.servers.preparing import PreparationOutcome, told
from trainsync.integrations.vllm import worker_calls
from trainsync.integrations.vllm.checks.drafts import unfit_for_drafts
from trainsync.integrations.vllm.errors import UnpreparableError
from trainsync.integrations.vllm.loaded_model import LoadedModel, Taken
from trainsync.integrations.vllm.preparing import PreparedVersion, PreparingThread
from trainsync.integrations.vllm.replacement import Replacement, Retired
from trainsync.integrations.vllm.room import check_rest, check_room, free_memory
from trainsync.integrations.vllm.twin import Twin, check_layers, twin_bytes
from trainsync.weights.errors import SchemaMismatchError, WeightsError
from trainsync.weights.staging.draft import DRAFT_PREFIX, has_draft, of_draft, of_target
from trainsync.weights.staging.index import StagedReference
from trainsync.weights.staging.reading import StagedReader, StagedVersion

_LOG: Final = init_logger("vllm.trainsync")  # vLLM shows no others
_MOST_NAMES: Final = 5


@dataclass
class InitInfo(WeightTransferInitInfo):  # type: ignore[misc]
    """A `StagedReference` to look at while the server serves; without, none."""

    index: str = ""
    digest: str = ""
    hosts: list[dict[str, str]] = field(default_factory=list)
    draft: bool = False


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):  # type: ignore[misc]
    """A `StagedReference` to load."""

    index: str
    digest: str
    hosts: list[dict[str, str]] = field(default_factory=list)
    draft: bool = False


class TrainsyncEngine(WeightTransferEngine[InitInfo, UpdateInfo]):  # type: ignore[misc]
    """See `vllm.distributed.weight_transfer.base.WeightTransferEngine`."""

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo
    supports_draft_weight_update = True

    def __init__(self, config: Any, vllm_config: Any, device: Any, model: Any) -> None:
        super().__init__(config, vllm_config, device, model)
        self._reader = StagedReader()
        self._staged: tuple[StagedReference, StagedVersion] | None = None
        self._preparing: PreparingThread | None = None
        self._retired = Retired()
        self._loaded = False
        self._asleep = False
        self._is_whole = True  # the weights are of one version, and have its name
        self._slept_since = False  # the weights came
        self._takes = Taken(self.model_config)
        self._target = LoadedModel(model, self.model_config)
        self._target.look_at_checkpoint()
        self._no_drafts = unfit_for_drafts(vllm_config)
        self._draft_takes = (
            None if self._no_drafts else Taken(vllm_config.speculative_config.draft_model_config)
        )
        self._draft: LoadedModel | None = None
        worker_calls.add()

    def note_sleep(self, *, asleep: bool) -> bool:
        """The memory of the weights is about to be freed, or is there again.

        Returns:
            whether the weights are of one version, of which vLLM has the name.

        Raises:
            EngineUpdateError: as `PreparingThread.abandon` does. Nothing has changed.
        """
        if asleep:
            self.abandon()
            self._staged = None
            self._slept_since |= self._loaded
            self._loaded = False
        self._asleep = asleep
        return self._is_whole

    def check_awake(self) -> None:
        """Raise `EngineUpdateError` if the weights sleep; nothing has changed."""
        if self._asleep:
            raise EngineUpdateError(
                f"{KEPT}: the server sleeps, and its weights are not in memory; expected wake_up"
            )

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        """Map a staged version and check that it fits, so that the pause need not wait for that.

        Raises:
            EngineUpdateError: the weights sleep. Nothing has changed.
            WeightsError: the version cannot be loaded. Nothing has changed.
        """
        self.check_awake()
        reference = _reference(init_info)
        if self._staged is not None and self._staged[0] == reference:
            return  # its preparation is kept, too
        self._staged = None
        self.abandon()
        if init_info.index or init_info.digest:
            self._staged = reference, self._open(reference)

    def prepare(self, seconds: float) -> None:
        """Begin to load the version that `init_transfer_engine` has looked at into memory beside
        the model's, which takes a thread, and a second copy of the weights.

        Args:
            seconds: for which the copy is kept.

        Raises:
            EngineUpdateError: there is no such version, or the weights sleep. Nothing has changed.
        """
        self.check_awake()
        if self._staged is None:
            raise EngineUpdateError(f"{KEPT}: there is no version to prepare")
        if self._preparing is None:
            staged = self._staged[1]
            self._preparing = PreparingThread(
                partial(self._prepare, staged), _name(staged), seconds
            )

    def prepared(self) -> dict[str, Any]:
        """See `trainsync.engines.servers.preparing.told`."""
        if self._preparing is None:
            return told(PreparationOutcome.LATE, "it was given up")
        return told(*self._preparing.ask())

    def abandon(self) -> None:
        """Give up a preparation, also an ended one. Raises as `PreparingThread.abandon` does."""
        preparing, self._preparing = self._preparing, None
        if preparing is not None:
            preparing.abandon()

    def set_weight_update_target(self, model: torch.nn.Module, model_config: Any) -> None:
        """Know the draft model, with which vLLM begins a session for it.

        That session brings the whole version all the same: one call loads target and draft.
        """
        if self._draft is None:
            self._draft = LoadedModel(model, model_config, "parameters of the draft model")
            self._draft.look_at_checkpoint()

    def start_weight_update(self) -> None:
        """Begin a session. The model stays as it is."""
        self._loaded = False

    def receive_weights(self, update_info: UpdateInfo) -> None:
        """Load the version that `init_transfer_engine` has looked at.

        No other version: a worker that refuses one now may be one of several, and the others load
        it.

        Raises:
            EngineUpdateError: the weights sleep, or the version is another one, or has weights of a
                draft model that vLLM has not told of: the message says `KEPT`, and the model has
                its weights from before. Or the preparation does not end: this model has its weights
                from before, too, but those of other workers may not; or loading failed half-way.
                After these two the model must not be used before another version is loaded.
        """
        self.check_awake()
        reference = _reference(update_info)
        prepared, self._staged = self._staged, None
        if prepared is None or prepared[0] != reference:
            raise EngineUpdateError(
                f"{KEPT}: {reference.index} was not what init_weight_transfer_engine got last"
            )
        staged = prepared[1]
        draft = of_draft(staged.tensors)
        if draft and self._draft is None:
            raise EngineUpdateError(
                f"{KEPT}: {_name(staged)} has a draft model, expected start_draft_weight_update"
            )
        self._loaded = False
        preparing, self._preparing = self._preparing, None
        version = None if preparing is None else preparing.take()
        self._is_whole = self._slept_since = False
        try:
            if version is None:
                self._target.load(of_target(staged.tensors), _name(staged))
            else:
                self._replace(version.replacement, staged)
            if draft and self._draft is not None:  # a draft without new weights keeps its own
                self._draft.load(draft, _name(staged))
        except Exception as error:
            raise EngineUpdateError(f"{_name(staged)}: {TORN}: {error}") from error
        self._loaded = True

    def finish_weight_update(self) -> None:
        """End the session, so that vLLM takes on the version's name.

        Raises:
            EngineUpdateError: nothing was loaded, and the session goes on: load a version. Or the
                weights sleep, or slept since they came: then they have no name.
        """
        if self._slept_since:
            raise EngineUpdateError("the server slept before its weights had their name")
        if not self._loaded:
            raise EngineUpdateError(f"{KEPT}: no weights came in this update")
        self._loaded = False
        self._is_whole = True
        self._retired.let_go()

    def shutdown(self) -> None:
        """Let go of staged memory, and of prepared weights."""
        self._staged = None
        self.abandon()

    def _open(self, reference: StagedReference) -> StagedVersion:
        rank = self.parallel_config.node_rank
        here = reference.on_host(rank)
        try:
            if here is None:
                raise SchemaMismatchError(
                    f"{reference.index} is staged on {1 + len(reference.hosts)} hosts, and this "
                    f"one has rank {rank}: name its agent in --other-hosts"
                )
            staged = self._reader.open(here)
            if (wrong := self._misfit(staged)) is not None:
                raise SchemaMismatchError(f"{_name(staged)}: {wrong}")
        except WeightsError as error:
            raise type(error)(f"{KEPT}: {error}") from error
        return staged

    def _misfit(self, staged: StagedVersion) -> str | None:
        """Why a version cannot be loaded; None: nothing is known."""
        metas = {meta.name: meta for meta in staged.index.schema.tensors}
        if has_draft(metas):
            if self._draft_takes is None:
                return f"tensors {DRAFT_PREFIX}* are of a draft model, but {self._no_drafts}"
            if (wrong := self._draft_takes.misfit(of_draft(metas))) is not None:
                return f"of the draft model, {wrong}"
        return self._takes.misfit(of_target(metas))

    def _prepare(self, staged: StagedVersion, go_on: Callable[[], None]) -> PreparedVersion:
        """The model with a version's weights, beside the one that serves. In another thread.

        A draft model is loaded in the pause.

        Raises:
            UnpreparableError, NoRoomError, WeightsError; also errors of ``go_on``.
        """
        if self.model_config.quantization is not None:
            raise UnpreparableError(f"the model is quantised ({self.model_config.quantization})")
        check_layers(self.model)
        here = self.parallel_config.world_size // self.parallel_config.nnodes
        size = twin_bytes(self.model)
        check_room(size, here, free_memory())

        def go_on_in_room() -> None:
            go_on()
            check_rest(size, here, free_memory())

        twin = Twin(self.model)
        try:
            tensors = of_target(staged.tensors)
            weights = self._target.weights(tensors)
            self._target.check_all_loaded(twin.load(_each(weights, go_on_in_room)))
            for _ in twin.process():
                go_on_in_room()
            looking = self._target.looking(tensors, _name(staged), twin.model)
            return PreparedVersion(twin.replacement(), looking, twin.close)
        except BaseException:
            twin.close()
            raise

    def _replace(self, replacement: Replacement, staged: StagedVersion) -> None:
        """Serve with the prepared weights.

        Raises:
            WeightsError: some layers have other weights.
        """
        self._retired.add(replacement, replacement.make())
        missed = replacement.missed(random.Random(_name(staged)))  # noqa: S311 - chooses rows
        if missed:
            names = ", ".join(missed[:_MOST_NAMES])
            raise WeightsError(f"{len(missed)} layers have other weights than prepared: {names}")
        _LOG.info("%s was prepared before the pause", _name(staged))


def _each(
    weights: list[tuple[str, torch.Tensor]], go_on: Callable[[], None]
) -> Iterator[tuple[str, torch.Tensor]]:
    for named in weights:
        go_on()
        yield named


def _name(staged: StagedVersion) -> str:
    return f"version {staged.index.weight_version}"


def _reference(info: InitInfo | UpdateInfo) -> StagedReference:
    return StagedReference.told(vars(info))
