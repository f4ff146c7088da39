"""The manager in verl's FSDP engines, and verl's trainer, in a run in a bucket.

The functions get the bucket's URL, the variables by which it is reached, and a directory of the
test's.
"""

import errno
import os
import signal
import threading
from pathlib import Path
from typing import Any

import torch.distributed as dist
from trainsync import failpoints
from trainsync.api.protocol import SaveKind
from trainsync.checkpoint.errors import SaveTimeoutError
from trainsync.storage.objects import commits
from trainsync.storage.objects.of_run import open_run_store

from tests.distributed.verl.scenarios.stage import Results, Run, Stage, refusal
from tests.distributed.verl.trainer import shorter, verls_trainer

OPTIM = "actor/optim_world_size_2_rank_1.pt"
CONTENTS = ("model", "optimizer", "extra")


def life(url: str, environ: dict[str, str], directory: Path, files: Path) -> Results:
    """Saves, loads, refusals and damage with FSDP2; then FSDP1, of which a rank is killed.

    Args:
        files: where the server has the objects of the bucket.
    """
    os.environ.update(environ)
    stage = Stage(directory)
    run = Run(stage, f"{url}/fsdp2")
    results: Results = {"fsdp2": saved_and_loaded(stage, run)}
    engine = stage.verl.make_engine(stage.model)
    manager = run.install(engine)
    results["refused"] = refused(manager, run, url)
    results |= aborted_and_flipped(stage, run, engine, manager, files / "fsdp2")
    run.close()
    run = Run(stage, f"{url}/fsdp1")
    contents = (*CONTENTS, "hf_model")
    results["fsdp1"] = saved_and_loaded(stage, run, strategy="fsdp", contents=contents)
    return killed(stage, run, results)


def saved_and_loaded(stage: Stage, run: Run, **options: Any) -> Results:
    """Two steps are saved, training goes on at once; another engine goes on from the second."""
    engine = stage.verl.make_engine(stage.model, **options)
    manager = run.install(engine)
    for step in (1, 2):
        stage.verl.train(engine, step)
        engine.save_checkpoint(run.path(step), None, step)
    results = {"at 2": stage.verl.fingerprint(engine)}
    if not options:
        results["whole"] = stage.verl.whole(engine)
    results["loss"] = stage.verl.train(engine, 3)  # while step 2 is uploaded
    results["at 3"] = stage.verl.fingerprint(engine)
    manager.wait_on_save_thread(60)
    dist.barrier()
    fresh = stage.verl.make_engine(stage.model, **options)
    run.install(fresh)
    fresh.load_checkpoint(run.path(2))
    results["loaded"] = stage.verl.fingerprint(fresh)
    results["loaded loss"] = stage.verl.train(fresh, 3)
    results["loaded at 3"] = stage.verl.fingerprint(fresh)
    return results


def refused(manager: Any, run: Run, url: str) -> Results:
    save, load = manager.save_checkpoint, manager.load_checkpoint
    return {
        "hdfs": refusal(save, run.path(3), hdfs_path="hdfs://x", global_step=3),
        "elsewhere": refusal(save, "/elsewhere/global_step_3/actor", global_step=3),
        "step": refusal(save, run.path(3), global_step=4),
        "other bucket": refusal(load, f"{url}/other/global_step_1/actor"),
        "not committed": refusal(load, run.path(7)),
    }


def aborted_and_flipped(stage: Stage, run: Run, engine: Any, manager: Any, files: Path) -> Results:
    """Step 4 fails on rank 1, step 5 is saved; then a byte of rank 1's file is flipped."""
    engine.load_checkpoint(run.path(2))
    fails = threading.Event()

    def phase(name: str) -> None:
        if name == "shard" and fails.is_set():
            raise OSError(errno.EIO, "the upload failed")

    failpoints.enable(failpoints.LIVE, phase)
    if stage.rank == 1:
        fails.set()
    stage.verl.train(engine, 4)
    manager.save_checkpoint(run.path(4), global_step=4)
    results: Results = {"aborted": refusal(manager.wait_on_save_thread, 60)}
    dist.barrier()
    fails.clear()
    manager.save_checkpoint(run.path(5), global_step=5)
    manager.wait_on_save_thread(60)
    dist.barrier()
    if stage.rank == 0:
        found = commits.read_manifest(open_run_store(str(run.where)), SaveKind.CHECKPOINT, 5)
        flip(files / found.keys[OPTIM])
    dist.barrier()
    before = stage.verl.fingerprint(engine)
    results["flipped"] = refusal(engine.load_checkpoint, run.path(5))
    results["untouched"] = stage.verl.fingerprint(engine) == before
    return results


def killed(stage: Stage, run: Run, results: Results) -> Results:
    """Rank 1 is killed before the receipts of step 5; rank 0 returns the results of both."""
    together: list[Any] = [None, None]
    dist.all_gather_object(together, results)
    returned, doomed = threading.Event(), threading.Event()

    def phase(name: str) -> None:
        if name == "shard" and doomed.is_set():
            returned.wait(60)
            os.kill(os.getpid(), signal.SIGKILL)

    failpoints.enable(failpoints.LIVE, phase)
    engine = stage.verl.make_engine(stage.model, strategy="fsdp")
    manager = run.install(engine)
    stage.verl.train(engine, 5)
    if stage.rank == 1:
        doomed.set()
    manager.save_checkpoint(run.path(5), global_step=5)
    if stage.rank == 1:
        returned.set()
        signal.sigtimedwait([], 60)
        raise AssertionError("still alive")
    survivor = ""
    manager.coordinator.wait_all(60)
    try:
        manager.wait_on_save_thread(2)
    except SaveTimeoutError as error:
        survivor = str(error)
    return {"ranks": together, "survivor": survivor}


def flip(path: Path) -> None:
    """Change a bit in the middle of a file."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def trains(url: str, environ: dict[str, str], directory: Path) -> Results:
    """verl's trainer goes on, on one rank, from what two ranks have saved, and saves step 3."""
    stage, trainer, engine = _trainer(url, environ, directory)
    trainer._load_checkpoint()
    seen: Results = {"step": trainer.global_steps, "whole": stage.verl.whole(engine)}
    batches = iter(trainer.train_dataloader)
    next(batches)
    stage.verl.train(engine, 3)
    seen["at"] = stage.verl.fingerprint(engine)
    trainer.global_steps = 3
    trainer._save_checkpoint()
    engine.checkpoint_manager.wait_on_save_thread(60)
    by_itself = refusal(engine.save_checkpoint, f"{url}/global_step_4/actor", None, 4)
    return seen | _state(trainer, batches) | {"by itself": by_itself}


def resumes(url: str, environ: dict[str, str], directory: Path, files: Path) -> Results:
    """Another process of verl's trainer goes on from there; then its own file is damaged."""
    stage, trainer, engine = _trainer(url, environ, directory)
    trainer._load_checkpoint()
    at = stage.verl.fingerprint(engine)  # an iterator draws a number
    seen = _state(trainer, iter(trainer.train_dataloader)) | {"at": at}
    config = trainer.config.trainer
    config.resume_mode, config.resume_from_path = "resume_path", f"{url}/global_step_2"
    trainer._load_checkpoint()
    seen["by path"] = trainer.global_steps, stage.verl.whole(engine)
    config.resume_from_path = f"{url}x/global_step_2"
    seen["other path"] = refusal(trainer._load_checkpoint)
    config.resume_mode, config.default_local_dir = "auto", "checkpoints"
    seen["other directory"] = refusal(trainer._load_checkpoint)
    config.default_local_dir = url
    loader = trainer.train_dataloader
    trainer.train_dataloader = shorter(loader)
    seen["other data"] = refusal(trainer._load_checkpoint)
    trainer.train_dataloader = loader
    found = commits.read_manifest(open_run_store(url), SaveKind.CHECKPOINT, 3)
    flip(files / found.keys["data.pt"])
    seen["damaged"] = refusal(trainer._load_checkpoint)
    return seen


def _trainer(url: str, environ: dict[str, str], directory: Path) -> tuple[Stage, Any, Any]:
    os.environ.update(environ)
    os.environ |= {"TRAINSYNC_CHECKPOINT_DIR": url, "TMPDIR": str(directory / "tmp")}
    (directory / "tmp").mkdir(exist_ok=True)
    os.chdir(directory)
    stage = Stage(directory)
    trainer, engines = verls_trainer(stage.verl, url, "actor")
    return stage, trainer, engines["actor"]


def _state(trainer: Any, batches: Any) -> Results:
    return {
        "next": next(batches).tolist(),
        "told": trainer.checkpoint_callback.seen,
        "directory": trainer.config.trainer.default_local_dir,
        "left": [path.name for path in Path("tmp").glob("trainsync-verl-*")],
    }
