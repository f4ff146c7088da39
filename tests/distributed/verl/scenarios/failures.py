"""Arguments that are refused, full disks, flipped bits, and ranks without memory."""

import errno
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch.distributed as dist
from pytest import MonkeyPatch
from trainsync.api.protocol import SaveKind
from trainsync.storage.layout import RunDirectory
from trainsync.storage.saves.manifest import committed_steps

from tests.distributed.verl.scenarios.stage import Results, Stage, refusal


def refused(stage: Stage) -> Results:
    """Refused arguments change no state."""
    from trainsync.engines.verl.install import install_checkpoint_manager

    run = stage.run("refusals")
    engine = stage.verl.make_engine(stage.model)
    manager = run.install(engine)
    save, path = manager.save_checkpoint, run.path(3)
    results = {
        "hdfs": refusal(save, path, hdfs_path="hdfs://x", global_step=3),
        "hdfs load": refusal(manager.load_checkpoint, path, hdfs_path="hdfs://x"),
        "elsewhere": refusal(save, "/elsewhere/global_step_3/actor", global_step=3),
        "step": refusal(save, path, global_step=4),
        "critic": refusal(save, path.replace("actor", "critic"), global_step=3),
        "one rank": refusal(save, path, global_step=3 + stage.rank),
        "removal": refusal(manager.remove_previous_save_local_path, path),
        "synchronizer": refusal(manager.upload_state_dict, 3),
        "engine": refusal(install_checkpoint_manager, SimpleNamespace(module=1), run.context),
        "nothing there": refusal(manager.load_checkpoint, path),
    }
    run.close()
    return results


def broken_files_and_disks(stage: Stage) -> Results:
    """A full disk on rank 1, with and without a wait; then a flipped bit in its file."""
    run, results = stage.run("broken"), Results()
    full, returned = threading.Event(), threading.Event()

    def phase(name: str) -> None:
        if name == "written" and full.is_set():
            returned.wait(60)  # otherwise staging the next part would raise this part's failure
            raise OSError(errno.ENOSPC, "No space left on device")

    engine = stage.verl.make_engine(stage.model)
    manager = run.install(engine, phase)

    def save(step: int) -> None:
        stage.verl.train(engine, step)
        returned.clear()
        try:
            manager.save_checkpoint(run.path(step), global_step=step)
        finally:
            returned.set()

    def wait() -> tuple[str, str]:
        outcome = refusal(manager.wait_on_save_thread, 60)
        dist.barrier()
        return outcome

    save(1)
    assert wait()[0] == ""
    if stage.rank == 1:
        full.set()
    save(2)
    results["waited"] = wait()
    save(3)
    deadline = time.monotonic() + 60
    # Three parts of this rank fail: model, optimizer and extra state.
    while stage.rank == 1 and manager.coordinator.stats.failures < 6:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    full.clear()
    dist.barrier()
    results["next save"] = refusal(save, 4)
    wait()
    save(5)
    results["after"] = wait()
    # Before the damage below is told: the monitor sets such a checkpoint aside.
    results["committed"] = {
        kind: committed_steps(RunDirectory(run.directory), kind) for kind in SaveKind
    }
    dist.barrier()
    if stage.rank == 0:
        victim = Path(run.path(5)) / "optim_world_size_2_rank_1.pt"
        data = bytearray(victim.read_bytes())
        data[len(data) // 2] ^= 1
        victim.write_bytes(data)
    dist.barrier()
    before = stage.verl.fingerprint(engine)
    results["flipped"] = refusal(manager.load_checkpoint, run.path(5))
    results["untouched"] = stage.verl.fingerprint(engine) == before
    run.close()
    return results


def failures_before_staging(stage: Stage) -> Results:
    """Rank 1 has no memory for a save or upload; the next save has memory again."""
    from trainsync.engines.fsdp import checkpoint_manager as ours

    run, results = stage.run("one-rank"), Results()
    engine = stage.verl.make_engine(stage.model)
    manager = run.install(engine, synchronizer=run.synchronizer())

    def no_memory(*args: Any, **kwargs: Any) -> None:
        raise MemoryError("no memory on this rank alone")

    def meets(place: object, name: str, step: int, call: Callable[..., object], *args: Any) -> None:
        stage.verl.train(engine, step)
        with MonkeyPatch.context() as patch:
            if stage.rank == 1:
                patch.setattr(place, name, no_memory)
            results[name] = refusal(call, *args)

    save = partial(manager.save_checkpoint, global_step=1, save_as_hf=True)
    meets(manager.lr_scheduler, "state_dict", 1, save, run.path(1))
    meets(ours, "chosen_state", 2, manager.save_state_dict, run.path(2), 2)
    meets(ours, "fsdp_upload_state_dict", 3, manager.upload_state_dict, 3)
    results["next"] = refusal(manager.save_checkpoint, run.path(3), global_step=3)
    manager.wait_on_save_thread(60)
    run.close()
    return results
