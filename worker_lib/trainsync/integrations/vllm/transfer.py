"""The engine in each worker of vLLM that loads staged weights.

One call of ``update_weights`` brings a whole version: between calls the model is always whole, so
that a client which dies between any two leaves nothing half-done. vLLM's layerwise reload does the
loading: fused, tied, sharded and quantised weights are its business.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
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
from trainsync.integrations.vllm.layer_check import LayerCheck
from trainsync.integrations.vllm.reload import reloading
from trainsync.weights.buckets.layout import TensorMeta
from trainsync.weights.errors import SchemaMismatchError, WeightsError
from trainsync.weights.staging.checkpoint import (
    TIED_HEAD,
    checkpoint_tensors,
    misfit,
    open_checkpoint,
)
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


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):  # type: ignore[misc]
    """A `StagedReference` to load."""

    index: str
    digest: str
    hosts: list[dict[str, str]] = field(default_factory=list)


class TrainsyncEngine(WeightTransferEngine[InitInfo, UpdateInfo]):  # type: ignore[misc]
    """See `vllm.distributed.weight_transfer.base.WeightTransferEngine`."""

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo
    supports_draft_weight_update = False

    def __init__(self, config: Any, vllm_config: Any, device: Any, model: Any) -> None:
        super().__init__(config, vllm_config, device, model)
        self._reader = StagedReader()
        self._staged: tuple[StagedReference, StagedVersion] | None = None
        self._takes = _takes(self.model_config)
        self._loaded = False
        self._layers: LayerCheck | None = LayerCheck(model, tied=_is_tied(self.model_config))
        self._look_at_checkpoint()

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        """Map a staged version and check that it fits, so that the pause need not wait for that.

        Raises:
            WeightsError: it cannot be loaded. Nothing has changed.
        """
        self._staged = None
        if init_info.index or init_info.digest:
            reference = _reference(init_info)
            self._staged = reference, self._open(reference)

    def start_weight_update(self) -> None:
        """Begin a session. The model stays as it is."""
        self._loaded = False

    def receive_weights(self, update_info: UpdateInfo) -> None:
        """Load the version that `init_transfer_engine` has looked at.

        No other one: a worker that refuses it now may be one of several, and the others load it.

        Raises:
            EngineUpdateError: it is not that version, and the model has the weights that it had; or
                loading failed half-way, and the model must not be used before another version is
                loaded. The message says which.
        """
        reference = _reference(update_info)
        prepared, self._staged = self._staged, None
        if prepared is None or prepared[0] != reference:
            raise EngineUpdateError(
                f"{KEPT}: {reference.index} was not what init_weight_transfer_engine got last"
            )
        staged = prepared[1]
        self._loaded = False
        try:
            self._load(staged)
        except Exception as error:
            raise EngineUpdateError(
                f"version {staged.index.weight_version}: {TORN}: {error}"
            ) from error
        self._loaded = True

    def finish_weight_update(self) -> None:
        """End the session, so that vLLM takes on the version's name.

        Raises:
            EngineUpdateError: nothing was loaded. The session goes on: load a version.
        """
        if not self._loaded:
            raise EngineUpdateError(f"{KEPT}: no weights came in this update")
        self._loaded = False

    def shutdown(self) -> None:
        """Let go of staged memory."""
        self._staged = None

    def _look_at_checkpoint(self) -> None:
        """Learn the layout of layers from the weights that vLLM itself has loaded."""
        folder = Path(self.model_config.model)
        if not folder.is_dir():
            return
        try:
            with open_checkpoint(folder) as tensors:
                self._look(tensors, str(folder))
        except (OSError, ValueError) as error:  # vLLM may need none, as with dummy weights
            _LOG.warning("layers are compared from the first version on: %s", error)

    def _look(self, tensors: Mapping[str, torch.Tensor], name: str) -> None:
        """Compare the layers with the tensors that were loaded into them.

        Raises:
            WeightsError: some have other weights.
        """
        if self._layers is None:
            return
        try:
            looked = self._layers.look(tensors, name)
        except Exception:  # noqa: BLE001 - told, and canaries still prove the server
            # A layer of a kind that nobody has tried: without it the server can serve as before.
            _LOG.exception("layers cannot be compared with %s, and are not from now on", name)
            self._layers = None
            return
        if looked.wrong:
            names = ", ".join(looked.wrong[:_MOST_NAMES])
            raise WeightsError(
                f"{len(looked.wrong)} parameters have other weights than were loaded: {names}"
            )
        _LOG.info("%d of %d parameters are as in %s", len(looked.right), looked.count, name)

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
            if self._takes is not None:
                wrong = misfit(
                    self._takes,
                    staged.index.schema.tensors,
                    str(self.model_config.dtype).removeprefix("torch."),
                    tied=_is_tied(self.model_config),
                )
                if wrong is not None:
                    raise SchemaMismatchError(f"version {staged.index.weight_version}: {wrong}")
        except WeightsError as error:
            raise type(error)(f"{KEPT}: {error}") from error
        return staged

    @torch.no_grad()
    def _load(self, staged: StagedVersion) -> None:
        tied = _is_tied(self.model_config)
        weights = [
            (name, tensor)
            for name, tensor in staged.tensors.items()
            if not (tied and name == TIED_HEAD)
        ]
        wanted = {name for name, _ in self.model.named_parameters()}  # a tied one under one name
        with reloading(self.model, self.model_config, tied=tied):
            loaded = self.model.load_weights(weights)
        self._look(staged.tensors, f"version {staged.index.weight_version}")
        # As vLLM's own loader does: layers of quantised models have parameters of their own.
        if loaded is not None and self.model_config.quantization is None:
            missing = sorted(wanted - loaded)
            if missing:
                names = ", ".join(missing[:_MOST_NAMES])
                raise SchemaMismatchError(f"{len(missing)} weights were not loaded: {names}")


def _reference(info: InitInfo | UpdateInfo) -> StagedReference:
    return StagedReference.told({"index": info.index, "digest": info.digest, "hosts": info.hosts})


def _takes(model_config: Any) -> list[TensorMeta] | None:
    """The names that the model takes; None without a local checkpoint: only loading tells then."""
    folder = Path(model_config.model)
    return checkpoint_tensors(folder) if folder.is_dir() else None


def _is_tied(model_config: Any) -> bool:
    return bool(getattr(model_config.hf_text_config, "tie_word_embeddings", False))
