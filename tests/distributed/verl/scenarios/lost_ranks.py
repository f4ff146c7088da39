"""A rank that is killed amid a save, and the attempt that resumes."""

import os
import signal
import threading
from pathlib import Path

import torch.distributed as dist
from trainsync.checkpoint.errors import SaveTimeoutError

from tests.distributed.verl.scenarios.stage import Results, Stage


def killed(directory: Path) -> Results:
    """Rank 1 is killed when the bytes of step 2 are on disk, before the rename of the file."""
    stage = Stage(directory)
    run = stage.run("killed")
    returned, doomed = threading.Event(), threading.Event()

    def phase(name: str) -> None:
        if name == "fsynced" and doomed.is_set():
            returned.wait(60)
            os.kill(os.getpid(), signal.SIGKILL)

    engine = stage.verl.make_engine(stage.model)
    manager = run.install(engine, phase if stage.rank == 1 else None)
    stage.verl.train(engine, 1)
    manager.save_checkpoint(run.path(1), global_step=1)
    manager.wait_on_save_thread(60)
    results = {"at 1": stage.verl.fingerprint(engine)}
    stage.verl.train(engine, 2)
    dist.barrier()
    if stage.rank == 1:
        doomed.set()
    manager.save_checkpoint(run.path(2), global_step=2)
    if stage.rank == 1:
        returned.set()
        signal.sigtimedwait([], 60)
        raise AssertionError("still alive")
    manager.coordinator.wait_all(60)  # waits for this rank's saves
    try:
        manager.wait_on_save_thread(3)
    except SaveTimeoutError as error:
        results["survivor"] = str(error)
    run.context.close()
    return results


def resumed(directory: Path) -> Results:
    stage = Stage(directory)
    run = stage.run("killed")
    resume = run.context.resume()
    engine = stage.verl.make_engine(stage.model)
    manager = run.install(engine)
    assert resume is not None
    engine.load_checkpoint(run.path(resume.step))
    results = {"step": resume.step, "loaded": stage.verl.fingerprint(engine)}
    stage.verl.train(engine, 2)
    manager.save_checkpoint(run.path(2), global_step=2)
    manager.wait_on_save_thread(60)
    run.close()
    return results
