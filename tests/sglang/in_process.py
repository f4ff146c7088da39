"""SGLang in its user's own process: ``in_process.py MODEL VERSION.safetensors …``.

Loads each version by the adapter and prints a JSON line for each: tokens, their log-probabilities.
"""

import json
import sys

import sglang
from safetensors.torch import load_file
from trainsync.engines.inference.sglang import SGLangEngine

PROMPT = [3, 14, 15, 92, 65, 35]


def _main(model: str, files: list[str]) -> None:
    llm = sglang.Engine(
        model_path=model,
        device="cpu",
        dtype="bfloat16",
        attention_backend="torch_native",
        sampling_backend="pytorch",
        max_total_tokens=1024,
        max_running_requests=8,
        mem_fraction_static=0.3,
    )
    engine = SGLangEngine(llm, bucket_size=20_000)
    for version, file in enumerate(files):
        engine.begin_update(version)
        engine.load_weights(load_file(file).items())
        answer = llm.generate(
            input_ids=PROMPT,
            sampling_params={"max_new_tokens": 12, "temperature": 0, "ignore_eos": True},
            return_logprob=True,
        )
        rows = answer["meta_info"]["output_token_logprobs"]
        tokens, said = [row[1] for row in rows], [row[0] for row in rows]
        print("ANSWER " + json.dumps([tokens, said]), flush=True)
    llm.shutdown()


if __name__ == "__main__":
    _main(sys.argv[1], sys.argv[2:])
