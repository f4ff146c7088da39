"""A Megatron weight as Hugging Face files have it, by mbridge's knowledge of models.

mbridge (https://github.com/ISEEKYAN/mbridge) knows for each kind of model which weights Megatron
fuses and what they are called. Here it is used without a process group and without Megatron's
parallel state: weights are whole already.
"""

import re
from typing import Any, Final

import torch

from trainsync.checkpoint.errors import MergeError

# Where the layout of Megatron's sharded state and mbridge's names differ. A layer without
# Transformer Engine has its norm apart, and mbridge knows that only of models with experts.
_EXPERTS: Final = ".mlp.experts.experts."
_NUMBERED: Final = re.compile(r"\.layers\.\d+\.")
_FUSED_NORM: Final = ".mlp.linear_fc1.layer_norm_weight"
_OWN_NORM: Final = ".pre_mlp_layernorm.weight"
_VOCABULARY: Final = ("embedding.word_embeddings.weight", "output_layer.weight")


class HuggingFaceNames:
    """Names and weights of one model.

    Args:
        config: of the model, of transformers.

    Raises:
        MergeError: mbridge is not installed, or does not know the model, or its configuration as
            the installed transformers has it.
    """

    def __init__(self, config: Any) -> None:
        try:
            from mbridge.core.bridge import _MODEL_REGISTRY
            from mbridge.core.parallel_states import ParallelStates
        except ImportError as error:
            raise MergeError(
                f"the weights are a Megatron model's, and mbridge is not installed ({error}); "
                "expected the extra trainsync[megatron]"
            ) from error
        known = _MODEL_REGISTRY.get(config.model_type)
        if known is None:
            raise MergeError(
                f"mbridge does not know models of type {config.model_type!r}; expected one of "
                f"{', '.join(sorted(_MODEL_REGISTRY))}"
            )
        # A bridge of tied weights changes its class's names: those of a class of its own.
        names = {"_DIRECT_MAPPING": dict(known._DIRECT_MAPPING)}
        kind = type(known.__name__, (known,), names)
        self._config = config
        try:
            self._bridge = kind(config, parallel_states=ParallelStates(vpp_size=None))
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise MergeError(
                f"mbridge knows models of type {config.model_type!r}, but not as this version of "
                f"transformers describes them: {error}"
            ) from error

    def convert(
        self, key: str, index: tuple[int, ...], weight: torch.Tensor
    ) -> list[tuple[str, torch.Tensor]]:
        """Names and tensors of the weight at ``index`` of a global tensor; views of ``weight``.

        Args:
            key: see `trainsync.checkpoint.megatron_shards.Box`.
            weight: whole; may be on the meta device.

        Raises:
            MergeError: mbridge does not know it.
        """
        if key in _VOCABULARY:
            weight = weight[: self._config.vocab_size]  # the rest is padding for even shards
        name = _megatron_name(key, index)
        candidates = [name]
        if name.endswith(_FUSED_NORM):
            candidates.append(name.replace(_FUSED_NORM, _OWN_NORM))
        problem: Exception | None = None
        for candidate in candidates:
            try:
                names, weights = self._bridge._weight_to_hf_format(candidate, weight)
            except (NotImplementedError, AssertionError, RuntimeError) as error:
                problem = error
            else:
                return list(zip(names, weights, strict=True))
        raise MergeError(
            f"mbridge cannot turn {name} of a {self._config.model_type} model into what Hugging "
            f"Face has: {problem}"
        )


def _megatron_name(key: str, index: tuple[int, ...]) -> str:
    """The name that the weight has in a model which is not sharded.

    Raises:
        MergeError: it is not known what the leading dimensions mean.
    """
    left = list(index)
    name = key
    # Where layers differ (the first ones have no experts, say), their numbers are in the key.
    if left and ".layers." in key and not _NUMBERED.search(key):
        name = name.replace(".layers.", f".layers.{left.pop(0)}.", 1)
    if left and _EXPERTS in key:
        name = name.replace(_EXPERTS, ".mlp.experts.") + str(left.pop(0))
    if left:
        raise MergeError(f"{key} has {len(index)} leading dimensions; expected layers and experts")
    return name
