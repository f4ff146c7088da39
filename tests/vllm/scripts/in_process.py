"""vLLM in its user's own process: ``in_process.py sync|async MODEL VERSION.safetensors …``.

Loads each version by the adapter and prints a JSON line for each: its name, tokens, their
log-probabilities.
"""

import asyncio
import json
import sys
from typing import Any

from safetensors.torch import load_file
from trainsync.engines.inference.vllm import AsyncVLLMEngine, VLLMEngine
from vllm import LLM, AsyncEngineArgs, SamplingParams
from vllm.v1.engine.async_llm import AsyncLLM

PROMPT = [3, 14, 15, 92, 65, 35]
_OPTIONS: dict[str, Any] = {
    "weight_transfer_config": {"backend": "trainsync"},
    "enforce_eager": True,
    "max_model_len": 256,
    "max_num_seqs": 8,
    "dtype": "bfloat16",
}
_SAMPLING = SamplingParams(temperature=0, max_tokens=12, logprobs=0)


def _tell(version: str, completion: Any) -> None:
    tokens = list(completion.token_ids)
    scores = [row[token].logprob for row, token in zip(completion.logprobs, tokens, strict=True)]
    print("ANSWER " + json.dumps([version, tokens, scores]), flush=True)


def _sync(model: str, files: list[str]) -> None:
    llm = LLM(model, **_OPTIONS)
    engine = VLLMEngine(llm)
    for version, file in enumerate(files):
        engine.begin_update(version)
        engine.load_weights(load_file(file).items())
        answer = llm.generate({"prompt_token_ids": PROMPT}, _SAMPLING)[0]
        _tell(llm.get_weight_version(), answer.outputs[0])
    engine.close()


async def _async(model: str, files: list[str]) -> None:
    llm = AsyncLLM.from_engine_args(AsyncEngineArgs(model=model, **_OPTIONS))
    engine = AsyncVLLMEngine(llm)
    for version, file in enumerate(files):
        engine.begin_update(version)
        await engine.load_weights(load_file(file).items())
        outputs = [
            answer
            async for answer in llm.generate(
                {"prompt_token_ids": PROMPT}, _SAMPLING, request_id=str(version)
            )
        ]
        _tell(await llm.get_weight_version(), outputs[-1].outputs[0])
    engine.close()
    llm.shutdown()


if __name__ == "__main__":
    kind, model, *files = sys.argv[1:]
    if kind == "sync":
        _sync(model, files)
    else:
        asyncio.run(_async(model, files))
