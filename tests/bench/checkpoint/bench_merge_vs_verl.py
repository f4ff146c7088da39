"""`merge` against verl's model merger, on the same FSDP2 checkpoint of 2 GB.

Two ranks save a random Qwen2 in fp32 like a trainer. Both mergers make a bf16 Hugging Face
directory, in turn, each time in a new process that has merged a model of a few kilobytes
before: so packages are loaded, which takes seconds either way. The files are in the page cache.
Ours also checks every shard's digest and syncs its files to the disk; verl's does neither. The
figure is the median of the rounds' ratios. The details have the seconds of both commands, with
the start of Python.

Memory is the peak resident memory of the process, with packages and mapped files.
"""

import asyncio
import logging
import shutil
import statistics
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

from safetensors import safe_open

from tests.bench import watched_command
from tests.bench.checkpoint.checkpoint_state import scratch
from tests.bench.checkpoint.merge_once import STEP, WAYS
from tests.bench.harness import Figure, spread
from tests.bench.watched_command import Ran
from tests.distributed.ranks import run_ranks, values_of

ROUNDS: Final = 5
COMMANDS: Final = 3
SECONDS: Final = 300.0

SIZES: Final = {
    "large": {
        "vocab_size": 64_000,
        "hidden_size": 1024,
        "intermediate_size": 4096,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
    },
    "tiny": {
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
    },
}


def save(directory: Path, sizes: dict[str, int]) -> None:
    """One of two ranks: commit a state dict of the model."""
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from trainsync import RunContext, all_ranks, fsdp_save_state_dict
    from transformers import Qwen2Config, Qwen2ForCausalLM

    dist.init_process_group("gloo")
    torch.manual_seed(0)
    config: Any = Qwen2Config(**sizes, tie_word_embeddings=False)
    model: Any = Qwen2ForCausalLM(config)
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("fsdp",))  # verl requires this name
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    context = RunContext.from_env(directory)
    coordinator = context.coordinator()
    fsdp_save_state_dict(
        SimpleNamespace(module=model), "actor", STEP, coordinator, logging.getLogger(__name__)
    )
    coordinator.wait_all(SECONDS)
    if dist.get_rank() == 0:
        everyone = all_ranks("model", world_size=dist.get_world_size())
        saved = coordinator.register_and_monitor(
            STEP, is_state_dict=True, state_dict_participants=everyone, timeout=SECONDS
        )
        asyncio.run(saved)
    dist.barrier()
    context.close()


class Bench:
    """Merges of the two runs in ``directory``."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._large = directory / "large"

    def warm(self, way: str) -> Ran:
        """One merge, in a warm process."""
        output = self._directory / "output"
        places = [str(self._directory / "tiny"), str(self._large), str(output)]
        command = [sys.executable, "-m", "tests.bench.checkpoint.merge_once", way, *places]
        try:
            return watched_command.run(command, SECONDS)
        finally:
            shutil.rmtree(output, ignore_errors=True)

    def command(self, way: str, output: Path) -> Ran:
        """One merge by its command line."""
        typed = {
            "ours": [
                *(str(Path(sys.executable).with_name("trainsync")), "checkpoints", "merge"),
                *(str(self._large), str(STEP), "--output", str(output)),
                *("--kind", "state_dict", "--dtype", "bfloat16"),
            ],
            "verl": [
                *(sys.executable, "-m", "verl.model_merger", "merge", "--backend", "fsdp"),
                *("--local_dir", str(self._large / f"global_step_{STEP}" / "actor")),
                *("--target_dir", str(output)),
            ],
        }
        return watched_command.run(typed[way], SECONDS)

    def commands(self) -> tuple[int, dict[str, list[Ran]]]:
        """Both commands, several times, and the bytes of the merged weights.

        Raises:
            RuntimeError: the commands made different weights.
        """
        found: dict[str, list[Ran]] = {way: [] for way in WAYS}
        made: list[dict[str, Any]] = []
        for number in range(COMMANDS):
            for way in found:
                output = self._directory / f"typed-{way}"
                found[way].append(self.command(way, output))
                if number == 0:
                    made.append(content(output))
                shutil.rmtree(output)
            if number == 0:
                first, second = made
                if first.keys() != second.keys() or not all(
                    first[name].equal(second[name]) for name in first
                ):
                    raise RuntimeError("the two made different weights; expected the same bits")
                size = sum(tensor.nbytes for tensor in first.values())
                made.clear()
                del first, second
        return size, found


def content(directory: Path) -> dict[str, Any]:
    """Names and tensors of a merged directory."""
    found = {}
    for path in sorted(directory.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            found |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    return found


def run() -> list[Figure]:
    """`merge_vs_verl` and `merge_vs_verl_peak_memory`."""
    warm: dict[str, list[Ran]] = {way: [] for way in WAYS}
    with scratch() as directory:
        for name, sizes in SIZES.items():
            values_of(run_ranks(save, directory / name, sizes, seconds=SECONDS))
        bench = Bench(directory)
        size, typed = bench.commands()
        for number in range(ROUNDS):
            for way in sorted(WAYS, reverse=number % 2 == 1):
                warm[way].append(bench.warm(way))
    seconds = {way: [float(ran.last_line) for ran in warm[way]] for way in WAYS}
    whole = {way: [ran.seconds for ran in typed[way]] for way in WAYS}
    speed, memory = {"bytes_bf16": float(size)}, {"bytes_bf16": float(size)}
    for way in WAYS:
        speed |= spread(f"{way}_seconds", seconds[way])
        speed |= spread(f"{way}_seconds_of_the_command", whole[way])
        memory[f"{way}_peak_bytes"] = float(max(ran.peak for ran in typed[way]))
        memory[f"{way}_peak_bytes_without_files"] = float(max(ran.peak_own for ran in typed[way]))
    speed["ratio_of_the_commands"] = ratio(whole)
    memory["ratio_without_files"] = (
        memory["ours_peak_bytes_without_files"] / memory["verl_peak_bytes_without_files"]
    )
    peer = "python -m verl.model_merger merge --backend fsdp, which checks and syncs nothing"
    return [
        Figure("merge_vs_verl", ratio(seconds), "times as fast", ">= 2", peer, speed),
        Figure(
            "merge_vs_verl_peak_memory",
            memory["ours_peak_bytes"] / memory["verl_peak_bytes"],
            "of its peak",
            "<= 0.5",
            peer,
            memory,
        ),
    ]


def ratio(seconds: dict[str, list[float]]) -> float:
    """The median of the rounds' ratios."""
    pairs = zip(seconds["verl"], seconds["ours"], strict=True)
    return statistics.median(theirs / ours for theirs, ours in pairs)
