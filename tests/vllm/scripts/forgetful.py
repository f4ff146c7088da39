"""vLLM that forgets to pack weights anew: ``forgetful.py KIND MODEL FIRST SECOND``.

Of a ``dense`` model, of one with ``experts``, or of a ``draft`` model beside a dense one.

Prints a line for each version: the second comes twice, and the first time packing is forgotten.
"""

import sys
from contextlib import ExitStack
from functools import partialmethod
from typing import Any
from unittest.mock import patch

from safetensors.torch import load_file
from trainsync.engines.errors import EngineUpdateError
from trainsync.engines.inference.vllm import VLLMEngine
from trainsync.integrations.vllm import reload
from vllm import LLM
from vllm.model_executor.layers.linear import UnquantizedLinearMethod

_PACK = UnquantizedLinearMethod.process_weights_after_loading


def _pack_but_one(method: Any, begins: str, layer: Any) -> None:
    kept = layer.cpu_linear
    _PACK(method, layer)
    if layer.prefix.startswith(begins) and "down_proj" in layer.prefix:
        layer.cpu_linear = kept


def _load(engine: VLLMEngine, version: int, file: str) -> None:
    try:
        engine.begin_update(version)
        engine.load_weights(load_file(file).items())
    except EngineUpdateError as error:
        print(f"TOLD {version} is refused: {error}", flush=True)
    else:
        print(f"TOLD {version} loaded", flush=True)


def main(kind: str, model: str, first: str, second: str) -> None:
    """Load both."""
    llm = LLM(
        model,
        weight_transfer_config={"backend": "trainsync"},
        enforce_eager=True,
        max_model_len=256,
        max_num_seqs=8,
        dtype="bfloat16",
        speculative_config={"method": "draft_model", "model": model, "num_speculative_tokens": 2}
        if kind == "draft"
        else None,
    )
    engine = VLLMEngine(llm)
    _load(engine, 1, first)
    with ExitStack() as stack:
        if kind == "experts":  # what vLLM 0.32 does by itself
            stack.enter_context(patch.object(reload, "_forget_expert_kernels", lambda model: []))
        else:
            name = "process_weights_after_loading"
            pack = partialmethod(_pack_but_one, "draft_model." if kind == "draft" else "")
            stack.enter_context(patch.object(UnquantizedLinearMethod, name, pack))
        _load(engine, 2, second)
    _load(engine, 2, second)
    engine.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
