"""This rank's coordinates in Megatron's parallel dimensions."""

from typing import Any, Final

from trainsync.checkpoint.megatron_shards import describe

_DIMENSIONS: Final = {
    "tp": "tensor_model_parallel",
    "pp": "pipeline_model_parallel",
    "ep": "expert_model_parallel",
    "cp": "context_parallel",
    "dp": "data_parallel",
}


class ParallelLayout:
    """Sizes of the parallel dimensions (tp, pp, ep, cp, dp), and this rank's coordinates.

    Raises:
        RuntimeError: Megatron's model parallelism is not initialised.
    """

    def __init__(self) -> None:
        from megatron.core import parallel_state

        if not parallel_state.model_parallel_is_initialized():
            raise RuntimeError(
                "Megatron's model parallelism is not initialised; expected "
                "megatron.core.parallel_state.initialize_model_parallel before"
            )
        self.sizes = {key: self._ask(parallel_state, key, "world_size") for key in _DIMENSIONS}
        self.coordinates = {key: self._ask(parallel_state, key, "rank") for key in _DIMENSIONS}

    def __str__(self) -> str:
        return describe(self.sizes)

    @staticmethod
    def _ask(state: Any, key: str, what: str) -> int:
        return int(getattr(state, f"get_{_DIMENSIONS[key]}_{what}")())
