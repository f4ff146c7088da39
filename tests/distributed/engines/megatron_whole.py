"""Functions of ranks that save and load whole checkpoints of Megatron. Import Megatron late."""

import logging
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from trainsync import (
    RunContext,
    TrainedMegatron,
    megatron_load_checkpoint,
    megatron_load_state_dict,
    megatron_save_checkpoint,
)
from trainsync.engines.adapt import adapt
from trainsync.storage.digest import new_hasher

from tests.distributed.engines.megatron_job import Results, forget, said, weights

CONTENTS = ("model", "optimizer", "extra")
_log = logging.getLogger("test")


def begin(environ: dict[str, str], model: Path) -> None:
    """Join the group, in a process that the variables of a bucket are given to."""
    os.environ.update(environ)
    dist.init_process_group("gloo")
    from tests.distributed.engines import megatron_cpu

    if dist.get_rank() == 0 and not model.exists():
        megatron_cpu.make_model(model)
    dist.barrier()


class Training:
    """An attempt of the run in a directory or bucket.

    Args:
        tp: tensor parallel ranks; the other ranks are data parallel.
    """

    def __init__(self, url: str, model: Path, *, tp: int) -> None:
        from tests.distributed.engines import megatron_cpu

        self.engine = megatron_cpu.make_engine(model, tp=tp, contents=CONTENTS)
        self.trained = TrainedMegatron(
            self.engine.module,
            self.engine.bridge,
            optimizer=self.engine.optimizer,
            lr_scheduler=self.engine.lr_scheduler,
        )
        self.context = RunContext.from_env(url)
        self.resume = self.context.resume()

    def step(self, number: int) -> None:
        from tests.distributed.engines import megatron_cpu

        megatron_cpu.train(self.engine, number)

    def save(self, step: int) -> None:
        coordinator = self.context.coordinator()
        small = {"note.txt": b"from the attachments"}
        assert megatron_save_checkpoint(self.trained, step, coordinator, _log, attachments=small)
        coordinator.finish(step, timeout=600)
        dist.barrier()

    def load(self) -> None:
        """From another state than the saved one."""
        assert self.resume is not None
        torch.manual_seed(0)
        forget(self.engine)
        megatron_load_checkpoint(self.trained, self.resume, _log, timeout=60)

    def next_step(self) -> Results:
        """What follows from all that was saved."""
        numbers = torch.rand(3).tolist()
        self.step(9)
        rate = self.engine.optimizer.param_groups[0]["lr"]
        return {"numbers": numbers, "weights": weights(self.engine), "rate": rate}

    def optimizer(self) -> str:
        """A digest of this rank's state."""
        hasher = new_hasher()
        for part in self.engine.optimizer.chained_optimizers:
            for group in part.optimizer.param_groups:
                for weight in group["params"]:
                    state = part.optimizer.state[weight]
                    for tensor in (weight, state["exp_avg"], state["exp_avg_sq"]):
                        hasher.update(tensor.detach().numpy().tobytes())
        return hasher.hexdigest()

    def close(self) -> None:
        dist.barrier()
        self.context.close()
        dist.barrier()


def save_and_reshape(url: str, environ: dict[str, str], model: Path) -> Results:
    """Two tensor parallel ranks save step 1, and load it; two data parallel ones save it as 2."""
    begin(environ, model)
    training = Training(url, model, tp=2)
    training.step(1)
    torch.manual_seed(7 + dist.get_rank())
    training.save(1)
    seen: Results = {"saved": weights(training.engine), "optimizer": training.optimizer()}
    seen["went on"] = training.next_step()
    training.close()

    same = Training(url, model, tp=2)
    same.load()
    seen["loaded optimizer"] = same.optimizer()
    seen["resumed"] = same.next_step()
    forget(same.engine)
    assert same.resume is not None
    megatron_load_state_dict(same.trained, same.resume, _log)
    seen["weights alone"] = weights(same.engine)
    same.close()

    other = Training(url, model, tp=1)
    other.load()
    seen["data parallel"] = weights(other.engine)
    other.save(2)
    other.close()
    return seen


def on_one_rank(url: str, environ: dict[str, str], model: Path) -> Results:
    """One rank loads step 2, and saves it as 3."""
    begin(environ, model)
    training = Training(url, model, tp=1)
    training.load()
    training.save(3)
    seen: Results = {"saved": weights(training.engine)}
    training.close()
    return seen


def go_on(url: str, environ: dict[str, str], model: Path, damaged: Path) -> Results:
    """Two tensor parallel ranks go on from step 3; then a byte of ``damaged`` changes."""
    begin(environ, model)
    training = Training(url, model, tp=2)
    training.load()
    seen: Results = {"optimizer": training.optimizer(), "resumed": training.next_step()}
    training.close()

    if dist.get_rank() == 0:
        data = bytearray(damaged.read_bytes())
        data[len(data) // 2] ^= 1
        damaged.write_bytes(bytes(data))
    dist.barrier()
    training = Training(url, model, tp=2)
    before = [tensor.detach().clone() for tensor in _parameters(training.engine)]
    seen["told"] = said(lambda: _load_untouched(training))
    pairs = zip(before, _parameters(training.engine), strict=True)
    seen["unchanged"] = all(torch.equal(one, other) for one, other in pairs)
    training.close()

    training = Training(url, model, tp=2)
    seen["older"] = None if training.resume is None else training.resume.step
    training.load()
    seen["from the older"] = training.optimizer()
    training.close()
    return seen


def _load_untouched(training: Training) -> None:
    assert training.resume is not None
    megatron_load_checkpoint(training.trained, training.resume, _log, timeout=60)


def _parameters(engine: Any) -> list[torch.Tensor]:
    return [*(p for chunk in adapt(engine).module for p in chunk.parameters())]
