"""verl's Megatron engine, whose checkpoints are in a bucket. Import Megatron late."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from trainsync import RunContext, install_checkpoint_manager
from trainsync.api.protocol import SaveKind
from trainsync.storage.objects import commits
from trainsync.storage.objects.of_run import open_run_store

from tests.distributed.engines.megatron_job import Results, said, weights
from tests.distributed.engines.megatron_whole import CONTENTS, begin

DAMAGED = "actor/optim_world_size_2_rank_1.pt"


def by_verl(url: str, environ: dict[str, str], model: Path, files: Path) -> Results:
    """Two tensor parallel ranks save and load; two data parallel ones load; a byte is flipped.

    Args:
        files: where the server has the objects of the run.
    """
    begin(environ, model)
    from tests.distributed.engines import megatron_cpu

    context = RunContext.from_env(url)

    def make(tp: int = 2, contents: Sequence[str] = CONTENTS) -> tuple[Any, Any]:
        engine = megatron_cpu.make_engine(model, tp=tp, contents=contents)
        return engine, install_checkpoint_manager(engine, context)

    def place(step: int) -> str:
        return f"{url}/global_step_{step}/actor"

    def next_step(engine: Any) -> Results:
        numbers = torch.rand(3).tolist()
        megatron_cpu.train(engine, 2)
        rate = engine.optimizer.param_groups[0]["lr"]
        return {"numbers": numbers, "weights": weights(engine), "rate": rate}

    engine, manager = make()
    megatron_cpu.train(engine, 1)
    torch.manual_seed(7 + dist.get_rank())
    engine.save_checkpoint(place(1), None, 1)
    seen: Results = {"saved": weights(engine), "went on": next_step(engine)}
    manager.wait_on_save_thread(60)
    dist.barrier()
    fresh, _ = make()
    torch.manual_seed(0)
    fresh.load_checkpoint(place(1), None, False)
    seen["resumed"] = next_step(fresh)
    other, _ = make(tp=1)
    other.load_checkpoint(place(1), None, False)
    seen["data parallel"] = weights(other)
    exporting, _ = make(contents=(*CONTENTS, "hf_model"))
    seen["export"] = said(lambda: exporting.save_checkpoint(place(2), None, 2))
    if dist.get_rank() == 0:
        found = commits.read_manifest(open_run_store(url), SaveKind.CHECKPOINT, 1)
        path = files / found.keys[DAMAGED]
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(data)
    dist.barrier()
    before = weights(fresh)
    seen["damaged"] = said(lambda: fresh.load_checkpoint(place(1), None, False))
    seen["unchanged"] = weights(fresh) == before
    return seen
