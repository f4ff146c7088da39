"""One model of a worker: the tensors that it takes, their load, and the comparison after it."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import torch
from vllm.logger import init_logger

from trainsync.integrations.vllm.checks.layers import LayerCheck
from trainsync.integrations.vllm.lora_names import without_wrappers
from trainsync.integrations.vllm.reload import reloading
from trainsync.weights.buckets.layout import TensorMeta
from trainsync.weights.errors import SchemaMismatchError, WeightsError
from trainsync.weights.staging.checkpoint import (
    TIED_HEAD,
    checkpoint_tensors,
    misfit,
    open_checkpoint,
)

_LOG: Final = init_logger("vllm.trainsync")  # vLLM shows no others
_MOST_NAMES: Final = 5


class Taken:
    """The tensors that a model takes.

    Args:
        model_config: of vLLM.
    """

    def __init__(self, model_config: Any) -> None:
        # Without a local checkpoint only loading tells.
        folder = Path(model_config.model)
        self._metas = checkpoint_tensors(folder) if folder.is_dir() else None
        self._dtype = str(model_config.dtype).removeprefix("torch.")
        self._tied = is_tied(model_config)

    def misfit(self, offered: Mapping[str, TensorMeta]) -> str | None:
        """Why the model does not take the offered tensors; None: the model takes them, or may."""
        if self._metas is None:
            return None
        metas = [replace(meta, name=name) for name, meta in offered.items()]
        return misfit(self._metas, metas, self._dtype, tied=self._tied)


class LoadedModel:
    """A model that a worker computes with. `weights` and `check_all_loaded` of any thread, the
    rest of one.

    Args:
        model_config: of vLLM.
        parameters: the word for the model's parameters, in messages.
    """

    def __init__(
        self, model: torch.nn.Module, model_config: Any, parameters: str = "parameters"
    ) -> None:
        self._model = model
        self._config = model_config
        self._parameters = parameters
        self._tied = is_tied(model_config)
        self._layers: LayerCheck | None = LayerCheck(model, tied=self._tied)

    def look_at_checkpoint(self) -> None:
        """Learn the layout of layers from the weights that vLLM itself has loaded."""
        folder = Path(self._config.model)
        if not folder.is_dir():
            return
        try:
            with open_checkpoint(folder) as tensors:
                self._look(tensors, str(folder))
        except (OSError, ValueError) as error:  # vLLM may need none, as with dummy weights
            _LOG.warning("layers are compared from the first version on: %s", error)

    def weights(self, tensors: Mapping[str, torch.Tensor]) -> list[tuple[str, torch.Tensor]]:
        """The tensors of a version that are loaded."""
        return [
            (name, tensor)
            for name, tensor in tensors.items()
            if not (self._tied and name == TIED_HEAD)
        ]

    @torch.no_grad()
    def load(self, tensors: Mapping[str, torch.Tensor], name: str) -> None:
        """Load a version, and compare layers with it.

        Args:
            name: of the version.

        Raises:
            WeightsError: some layers have other weights, or none.
        """
        load: Any = self._model.load_weights
        with reloading(self._model, self._config, tied=self._tied):
            loaded = load(self.weights(tensors))
        self._look(tensors, name)
        self.check_all_loaded(loaded)

    def looking(
        self, tensors: Mapping[str, torch.Tensor], name: str, model: torch.nn.Module
    ) -> Iterator[None]:
        """Compare a model's layers with the tensors that were loaded into them, layer by layer.

        Args:
            name: of the tensors.
            model: this model, or a copy that is to take its place.

        Raises:
            WeightsError: some layers have other weights; or layers of a copy cannot be compared.
        """
        if self._layers is None:
            return
        try:
            looked = yield from self._layers.looking(tensors, name, model)
        except Exception as error:
            if model is not self._model:  # a fault of the copy, without which the server can do
                raise WeightsError(f"prepared layers cannot be compared: {error!r}") from error
            # A layer of an untried kind: the server can serve without the comparison, as before.
            _LOG.exception("layers cannot be compared with %s, and are not from now on", name)
            self._layers = None
            return
        if looked.wrong:
            names = ", ".join(looked.wrong[:_MOST_NAMES])
            raise WeightsError(
                f"{len(looked.wrong)} {self._parameters} have other weights than were loaded: "
                f"{names}"
            )
        right = len(looked.right)
        _LOG.info("%d of %d %s are as in %s", right, looked.count, self._parameters, name)

    def check_all_loaded(self, loaded: set[str] | None) -> None:
        """Raises `SchemaMismatchError`: some parameters were not loaded.

        Args:
            loaded: names that the model's own loader told; None: the loader tells none.
        """
        # A tied parameter has one name; below LoRA vLLM tells names from before it wrapped layers.
        wanted = {without_wrappers(name) for name, _ in self._model.named_parameters()}
        # As vLLM's own loader does: layers of quantised models have parameters of their own.
        if loaded is not None and self._config.quantization is None:
            missing = sorted(wanted - loaded)
            if missing:
                names = ", ".join(missing[:_MOST_NAMES])
                raise SchemaMismatchError(f"{len(missing)} weights were not loaded: {names}")

    def _look(self, tensors: Mapping[str, torch.Tensor], name: str) -> None:
        """All of `looking`, at this model."""
        for _ in self.looking(tensors, name, self._model):
            pass


def is_tied(model_config: Any) -> bool:
    """Whether the head's weights are those of the embedding."""
    return bool(getattr(model_config.hf_text_config, "tie_word_embeddings", False))
