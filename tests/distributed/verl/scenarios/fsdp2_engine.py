"""The whole life of a manager in verl's FSDP2 engine, on two ranks and on one."""

import shutil
from pathlib import Path
from typing import Any

import ray
import torch
import torch.distributed as dist

from tests.distributed.verl.scenarios.failures import (
    broken_files_and_disks,
    failures_before_staging,
    refused,
)
from tests.distributed.verl.scenarios.stage import Results, Stage, differing, published, refusal


def fsdp2(directory: Path, ray_arguments: dict[str, Any]) -> Results:
    stage = Stage(directory)
    ray.init(**ray_arguments)
    return {
        "saved": saved_by_ours(stage),
        "exchange": exchanged_with_verl(stage),
        "reuse": state_dict_first(stage),
        "refusals": refused(stage),
        "broken": broken_files_and_disks(stage),
        "one rank": failures_before_staging(stage),
    }


def saved_by_ours(stage: Stage) -> Results:
    """Train, save by verl's engine, continue at once; then load by verl's manager and by ours."""
    run, results = stage.run("run"), Results()
    engine = stage.verl.make_engine(stage.model)
    theirs = engine.checkpoint_manager
    manager = run.install(engine)
    for step in (1, 2):
        stage.verl.train(engine, step)
        engine.save_checkpoint(run.path(step), global_step=step, max_ckpt_to_keep=1)
        if stage.rank == 0:  # like verl's trainer, for its dataloader
            folder = Path(run.path(step)).parent
            folder.mkdir(exist_ok=True)
            (folder / "data.pt").write_text(str(step))
    results["at 2"] = stage.verl.fingerprint(engine)
    results["whole"] = stage.verl.whole(engine)
    results["schedule"] = engine.lr_scheduler.state_dict()
    results["loss"] = stage.verl.train(engine, 3)  # while step 2 is being written
    results["at 3"] = stage.verl.fingerprint(engine)
    manager.wait_on_save_thread(60)
    dist.barrier()
    engine.checkpoint_manager = theirs
    engine.load_checkpoint(run.path(2))
    results["theirs at 2"] = stage.verl.fingerprint(engine)
    results["theirs loss"] = stage.verl.train(engine, 3)
    results["theirs at 3"] = stage.verl.fingerprint(engine)
    fresh = stage.verl.make_engine(stage.model)
    manager = run.install(fresh)
    fresh.load_checkpoint(run.path(2))
    results["ours at 2"] = stage.verl.fingerprint(fresh)
    results["ours loss"] = stage.verl.train(fresh, 3)
    results["ours at 3"] = stage.verl.fingerprint(fresh)
    results["paths"] = manager.previous_saved_paths
    run.close()
    return results


def exchanged_with_verl(stage: Stage) -> Results:
    """Our manager loads checkpoints of verl's manager outside of the run, and refuses them
    inside."""
    run, results = stage.run("exchange"), Results()
    engine = stage.verl.make_engine(stage.model)
    stage.verl.train(engine, 1)
    elsewhere = stage.directory / "verl" / "global_step_1" / "actor"
    engine.save_checkpoint(str(elsewhere), global_step=1)
    results["saved"] = stage.verl.fingerprint(engine)
    stage.verl.train(engine, 2)
    manager = run.install(engine)
    engine.load_checkpoint(str(elsewhere))
    results["loaded"] = stage.verl.fingerprint(engine)
    if stage.rank == 0:
        shutil.copytree(elsewhere, run.path(1))
    dist.barrier()
    results["inside"] = refusal(manager.load_checkpoint, run.path(1))
    run.close()
    return results


def state_dict_first(stage: Stage) -> Results:
    """State dicts, a checkpoint that reuses one, and the whole model for transformers."""
    run, results = stage.run("reuse"), Results()
    synchronizer = run.synchronizer()
    engine = stage.verl.make_engine(stage.model)
    start = stage.run("start")
    manager = start.install(engine)
    manager.save_state_dict(start.path(0), 0)  # before any training
    manager.save_checkpoint(start.path(0), global_step=0)
    manager.wait_on_save_thread(60)
    start.close()
    manager = run.install(engine, synchronizer=synchronizer)
    manager.save_state_dict(run.path(0), 0)
    manager.upload_state_dict(0)
    versions = [published(synchronizer)]
    stage.verl.train(engine, 1)
    manager.save_state_dict(run.path(1), 1)
    manager.save_state_dict(run.path(1), 1)
    manager.save_checkpoint(run.path(1), global_step=1, save_as_hf=True)
    manager.save_checkpoint(run.path(1), global_step=1)
    with torch.no_grad():
        before = [parameter.to_local().clone() for parameter in engine.module.parameters()]
        for parameter in engine.module.parameters():
            parameter.zero_()
    manager.wait_on_save_thread(60)
    with torch.no_grad():
        for parameter, value in zip(engine.module.parameters(), before, strict=True):
            parameter.to_local().copy_(value)
    full = {name: tensor.full_tensor() for name, tensor in engine.module.state_dict().items()}
    dist.barrier()
    if stage.rank == 0:
        results |= compared_with_hf(stage, Path(run.path(1)), full)
    dist.barrier()
    # The next attempt starts from there: explorers have these weights, and no file is rewritten.
    engine = stage.verl.make_engine(stage.model)
    manager = run.install(engine, synchronizer=synchronizer)
    manager.load_checkpoint(run.path(1))
    manager.save_state_dict(run.path(1), 1)
    results["resumed"] = manager.coordinator.stats.saves
    results["versions"] = [*versions, published(synchronizer)]
    run.close()
    return results


def compared_with_hf(stage: Stage, actor: Path, full: dict[str, torch.Tensor]) -> Results:
    """A committed folder, loaded by transformers and merged by verl's merger."""
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from verl.model_merger.base_model_merger import ModelMergerConfig
    from verl.model_merger.fsdp_model_merger import FSDPModelMerger

    merged = stage.directory / "merged"
    exported = AutoModelForCausalLM.from_pretrained(actor / "huggingface", dtype=torch.float32)
    FSDPModelMerger(
        ModelMergerConfig(
            operation="merge",
            backend="fsdp",
            local_dir=str(actor),
            target_dir=str(merged),
            hf_model_config_path=str(actor / "huggingface"),
        )
    ).merge_and_save()
    together = AutoModelForCausalLM.from_pretrained(merged, dtype=torch.bfloat16)
    vocabularies = [
        AutoTokenizer.from_pretrained(path).get_vocab()
        for path in (stage.model, actor / "huggingface")
    ]
    return {
        "exported": differing(exported.state_dict(), full),
        "merged": differing(
            together.state_dict(), {name: tensor.bfloat16() for name, tensor in full.items()}
        ),
        "temperature": exported.generation_config.temperature,
        "vocabularies": vocabularies,
    }


def alone(directory: Path) -> Results:
    """One rank resumes from the save of two ranks, and saves."""
    stage = Stage(directory)
    run = stage.run("alone")
    engine = stage.verl.make_engine(stage.model)
    manager = run.install(engine)
    engine.load_checkpoint(run.path(2))
    results = {"whole": stage.verl.whole(engine), "schedule": engine.lr_scheduler.state_dict()}
    stage.verl.train(engine, 3)
    engine.save_checkpoint(run.path(3), global_step=3)
    manager.wait_on_save_thread(60)
    run.close()
    return results
