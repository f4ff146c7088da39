"""FSDP1, offload, LoRA, a critic, and state dicts alone."""

import asyncio
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ray
import torch
import torch.distributed as dist
from trainsync import all_ranks
from trainsync.api.protocol import SaveKind
from trainsync.storage.layout import RunDirectory

from tests.distributed.verl.scenarios.stage import Results, Stage, differing, refusal
from tests.distributed.verl.verl_version import VERL_0_8


def others(directory: Path, ray_arguments: dict[str, Any]) -> Results:
    stage = Stage(directory)
    ray.init(**ray_arguments)
    results = {
        "fsdp1": round_trip(stage, "fsdp1", strategy="fsdp"),
        "offload": round_trip(stage, "offload", offload=True),
        "overlapped": round_trip(stage, "overlapped", overlapped=True),
        "lora": round_trip(stage, "lora", lora_rank=4),
        "state dicts": state_dicts_alone(stage),
        "older": after_an_older_attempt(stage),
    }
    if not VERL_0_8:  # 0.8 returns the base model alone for merged weights
        results["merged"] = merged_state_dict(stage)
        results["critic"] = actor_and_critic(stage)
    if not VERL_0_8:  # 0.8 has no option to save an adapter alone
        results["adapter"] = round_trip(stage, "adapter", lora_rank=4, lora_only=True)
    return results


def round_trip(stage: Stage, name: str, *, overlapped: bool = False, **options: Any) -> Results:
    """Save by our manager with an export of the full model, continue, load by verl's manager and by
    ours."""
    from verl.utils.fsdp_utils import get_fsdp_full_state_dict

    run = stage.run(name)
    contents = ("model", "optimizer", "extra", "hf_model")
    engine = stage.verl.make_engine(stage.model, contents=contents, **options)
    theirs = engine.checkpoint_manager
    manager = run.install(engine, overlapped=overlapped)
    for step in (1, 2):
        stage.verl.train(engine, step)
    engine.save_checkpoint(run.path(2), global_step=2)
    saved, loss = stage.verl.fingerprint(engine), stage.verl.train(engine, 3)
    manager.wait_on_save_thread(60)
    dist.barrier()
    results = {"saved": saved, "loss": loss}
    for who, kept in (("theirs", theirs), ("ours", manager)):
        engine.checkpoint_manager = kept
        engine.load_checkpoint(run.path(2))
        results[f"{who} loaded"] = stage.verl.fingerprint(engine)
        results[f"{who} loss"] = stage.verl.train(engine, 3)
    engine.load_checkpoint(run.path(2))
    # Offloading from the CPU to the CPU fails with FSDP1 and torch before 2.15.
    full = get_fsdp_full_state_dict(engine.module, offload_to_cpu=False)
    if stage.rank == 0:
        results["exported"] = export_differs(stage, engine, Path(run.path(2)) / "huggingface", full)
    run.close()
    return results


def merged_state_dict(stage: Stage) -> Results:
    """State dict, upload and checkpoint of one step, with LoRA merged by verl."""
    run = stage.run("merged")
    engine = stage.verl.make_engine(stage.model, lora_rank=4, lora_merged=True)
    manager = run.install(engine, synchronizer=run.synchronizer())
    explorer = run.context.explorer("explorer") if stage.rank == 0 else None
    for step in (1, 2):
        stage.verl.train(engine, step)
    manager.save_state_dict(run.path(2), 2)
    manager.upload_state_dict(2)
    engine.save_checkpoint(run.path(2), global_step=2)
    results = {"saved": stage.verl.fingerprint(engine)}
    weights = {name: tensor.cpu() for name, tensor in engine.get_per_tensor_param()[0]}
    if explorer is not None:
        taken = explorer.wait_and_fetch(1)
        results["taken"] = taken.version
        results["taken differs"] = differing_in_bfloat16(taken.state_dict, weights)
        explorer.acknowledge(taken)
        explorer.leave()
    dist.barrier()
    stage.verl.train(engine, 3)
    manager.wait_on_save_thread(60)
    dist.barrier()
    engine.load_checkpoint(run.path(2))
    results["loaded"] = stage.verl.fingerprint(engine)
    if stage.rank == 0:
        results["differs"] = merged_differs(run.directory, weights)
    run.close()
    return results


def merged_differs(directory: Path, weights: dict[str, torch.Tensor]) -> list[str]:
    """Differences between a merge of the state dict and the weights that verl sends."""
    from safetensors.torch import load_file
    from trainsync.checkpoint.merge.merge import merge_to_hf

    output = directory.with_name("merged-hf")
    merge_to_hf(directory, 2, output, kind=SaveKind.STATE_DICT)
    return differing_in_bfloat16(load_file(output / "model.safetensors"), weights)


def differing_in_bfloat16(
    found: Mapping[str, torch.Tensor], weights: dict[str, torch.Tensor]
) -> list[str]:
    """Names whose tensors differ from those that verl sends, in verl's dtype."""
    names = sorted(found.keys() ^ weights.keys())
    shared = found.keys() & weights.keys()
    return names + differing(
        {name: found[name].to(weights[name].dtype) for name in shared},
        {name: weights[name] for name in shared},
    )


def actor_and_critic(stage: Stage) -> Results:
    """Two models of a run, saved one after another and committed together."""
    from trainsync.engines.verl.install import install_checkpoint_manager

    run, results = stage.run("critic"), Results()
    engines = {
        name: stage.verl.make_engine(stage.model, critic=name == "critic")
        for name in ("actor", "critic")
    }
    managers = {
        name: install_checkpoint_manager(engine, run.context, last_step=2)
        for name, engine in engines.items()
    }
    manifest = RunDirectory(run.directory).manifest(SaveKind.CHECKPOINT, 2)
    for step in (1, 2):
        for name, engine in engines.items():
            stage.verl.train(engine, step)
            path = run.path(step).replace("actor", name)
            engine.save_checkpoint(path, None, step)
    results["committed"] = stage.rank > 0 or manifest.exists()
    results["saved"] = {name: stage.verl.fingerprint(engine) for name, engine in engines.items()}
    results["state dict"] = refusal(managers["critic"].save_state_dict, path, 2)
    results["folder"] = refusal(engines["critic"].save_checkpoint, run.path(3), None, 3)
    dist.barrier()
    for name, engine in engines.items():
        stage.verl.train(engine, 3)
        engine.load_checkpoint(run.path(2).replace("actor", name))
    results["loaded"] = {name: stage.verl.fingerprint(engine) for name, engine in engines.items()}
    run.close()
    return results


def state_dicts_alone(stage: Stage) -> list[str]:
    """`fsdp_save_state_dict` on several kinds of engines; returns differences after verl's
    loader."""
    from trainsync import fsdp_save_state_dict

    run, wrong = stage.run("state-dicts"), []
    kinds: list[dict[str, Any]] = [
        {},
        {"strategy": "fsdp", "offload": True},
        {"lora_rank": 4},
    ]
    coordinator = run.context.coordinator()
    for step, kind in enumerate(kinds, start=1):
        engine = stage.verl.make_engine(stage.model, contents=("model",), **kind)
        for number in (1, 2):
            stage.verl.train(engine, number)
        before = stage.verl.weights_fingerprint(engine)
        fsdp_save_state_dict(engine, run.path(step), step, coordinator, logging.getLogger("test"))
        stage.verl.train(engine, 3)
        if stage.rank == 0:
            participants = all_ranks("model", world_size=2)
            asyncio.run(
                coordinator.register_and_monitor(
                    step, True, state_dict_participants=participants, timeout=60
                )
            )
        dist.barrier()
        engine.load_checkpoint(run.path(step))
        if stage.verl.weights_fingerprint(engine) != before:
            wrong.append(str(kind))
    run.close()
    return wrong


def export_differs(
    stage: Stage, engine: Any, exported: Path, full: dict[str, torch.Tensor]
) -> list[str]:
    """Differences between the exported model and ``full``: names, or outputs for a probe."""
    from peft import PeftModel, get_peft_model
    from transformers import AutoModelForCausalLM

    def read(path: Path) -> Any:
        return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)

    model = getattr(engine.module, "_fsdp_wrapped_module", engine.module)
    if not hasattr(model, "peft_config"):
        return differing(read(exported).state_dict(), full)
    expected = get_peft_model(read(stage.model), model.peft_config["default"])
    expected.load_state_dict(full)
    found = PeftModel.from_pretrained(read(exported), exported / "lora_adapter")
    probe = torch.arange(8)[None]
    with torch.no_grad():
        answers = [m.eval()(probe).logits for m in (expected, found, read(exported))]
    if torch.equal(answers[0], answers[2]):
        return ["the adapter makes no difference"]
    return [] if torch.equal(answers[0], answers[1]) else ["logits"]


def after_an_older_attempt(stage: Stage) -> Results:
    """An attempt reaches steps with state dicts committed by the attempt before."""
    engine = stage.verl.make_engine(stage.model)
    for step in (1, 2):
        stage.verl.train(engine, step)  # the first step has a learning rate of 0
    run = stage.run("older")
    manager = run.install(engine)
    for step in (5, 6):
        manager.save_state_dict(run.path(step), step)
    manager.wait_on_save_thread(60)
    run.close()
    run, results = stage.run("older"), Results()
    manager = run.install(engine)
    for step in (5, 6, 7):  # equal weights, other weights, and a new step
        manager.save_checkpoint(run.path(step), global_step=step)
        stage.verl.train(engine, step)
    results["wait"] = refusal(manager.wait_on_save_thread, 60)
    results["attempt"] = run.context.attempt
    run.close()
    return results
