"""A real vLLM on the CPU whose layers are corrupted on purpose, and looked at.

The module runs twice: `RealLayers` in the tests' environment, and, as a script, in that of vLLM:
``real_layers.py MODEL`` reads a line for each trial and writes one.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, Final

import torch

State = dict[str, torch.Tensor]

_HEAD: Final = "lm_head.weight"
_EMBEDDING: Final = "model.embed_tokens.weight"
_ANSWER: Final = "LOOKED "


class RealLayers:
    """The layers of one model in a vLLM of its own process.

    Args:
        python: the interpreter of vLLM's environment.
        environment: its variables.
        model: a folder; the versions are those of `tests.corruptions.versions`.
    """

    def __init__(self, python: Path, environment: dict[str, str], model: Path) -> None:
        self._folder = tempfile.TemporaryDirectory(dir="/dev/shm")
        self._process = subprocess.Popen(
            [python, __file__, model],
            env={**environment, "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "OMP_NUM_THREADS": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._answer()  # it has started

    def wrong(self, served: State, staged: State) -> list[str]:
        """The parameters that a worker finds to be others than ``staged``, with ``served`` loaded.

        Raises:
            RuntimeError: the process has ended.
        """
        file = Path(self._folder.name) / "states"
        torch.save((served, staged), file)
        assert self._process.stdin is not None
        self._process.stdin.write(f"{file}\n")
        self._process.stdin.flush()
        return self._answer()

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.wait()
        self._folder.cleanup()

    def _answer(self) -> list[str]:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(_ANSWER):
                found: list[str] = json.loads(line.removeprefix(_ANSWER))
                return found
        raise RuntimeError(f"vLLM ended with {self._process.wait()}")


def for_checkpoint(state: State) -> State:
    """Experts one by one, as vLLM takes them from a checkpoint."""
    found = {}
    for name, tensor in state.items():
        parent, _, last = name.rpartition(".")
        if last == "gate_up_proj":
            for number, expert in enumerate(tensor):
                gate, up = expert.chunk(2)
                found[f"{parent}.{number}.gate_proj.weight"] = gate.contiguous()
                found[f"{parent}.{number}.up_proj.weight"] = up.contiguous()
        elif last == "down_proj":
            for number, expert in enumerate(tensor):
                found[f"{parent}.{number}.down_proj.weight"] = expert
        else:
            found[name] = tensor
    return found


def _serve(folder: str) -> None:
    from trainsync.integrations.vllm.checks.layers import LayerCheck
    from trainsync.integrations.vllm.reload import reloading
    from trainsync.weights.staging.checkpoint import open_checkpoint
    from vllm import LLM
    from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm

    llm = LLM(
        folder,
        weight_transfer_config={"backend": "trainsync"},
        enforce_eager=True,
        max_model_len=256,
        max_num_seqs=8,
        dtype="bfloat16",
    )
    config = llm.llm_engine.model_config
    tied = bool(config.hf_text_config.tie_word_embeddings)
    checks: list[LayerCheck] = []

    def first(model: torch.nn.Module) -> list[str]:
        checks.append(LayerCheck(model, tied=tied))
        with open_checkpoint(Path(folder)) as tensors:
            return list(checks[0].look(tensors, "checkpoint").wrong)

    @torch.no_grad()
    def trial(model: Any) -> list[str]:
        served, staged = (for_checkpoint(state) for state in torch.load(line, weights_only=True))
        head = served[_HEAD]
        if tied:
            del served[_HEAD], staged[_HEAD]
        with reloading(model, config, tied=tied):
            model.load_weights(served.items())
        if tied and not torch.equal(head, served[_EMBEDDING]):
            fresh = torch.nn.Module()
            fresh.weight = torch.nn.Parameter(head, requires_grad=False)
            dispatch_cpu_unquantized_gemm(fresh, remove_weight=False)
            model.lm_head.cpu_linear = fresh.cpu_linear
        return list(checks[0].look(staged, os.urandom(8).hex()).wrong)

    print(_ANSWER + json.dumps(llm.apply_model(first)[0]), flush=True)
    for row in sys.stdin:
        line = row.strip()
        print(_ANSWER + json.dumps(llm.apply_model(trial)[0]), flush=True)


if __name__ == "__main__":
    _serve(sys.argv[1])
