"""Functions of ranks with verl's real engine, for `test_fsdp_checkpoint_manager`. Import verl
late."""

import asyncio
import errno
import logging
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import ray
import torch
import torch.distributed as dist
from pytest import MonkeyPatch
from trainsync import RunContext, all_ranks, failpoints
from trainsync.api.protocol import SaveKind
from trainsync.checkpoint.coordinator import CheckpointCoordinator
from trainsync.checkpoint.errors import SaveTimeoutError
from trainsync.storage.layout import RunDirectory

from tests.distributed.forked import UNDER_VERL, preload
from tests.distributed.verl.verl_version import VERL_0_8

preload(*UNDER_VERL)

Results = dict[str, Any]


class Stage:
    """The tiny model and the runs of one rank."""

    def __init__(self, directory: Path) -> None:
        from tests.distributed.verl import verl_cpu

        dist.init_process_group("gloo")
        self.verl = verl_cpu
        self.directory = directory
        self.rank = dist.get_rank()
        if self.rank == 0 and not self.model.exists():
            verl_cpu.make_model(self.model)
        dist.barrier()

    @property
    def model(self) -> Path:
        return self.directory / "hf"

    def run(self, name: str) -> "Run":
        return Run(self, self.directory / name)


class Run:
    """A run's directory, joined by this rank."""

    def __init__(self, stage: Stage, directory: Path) -> None:
        self.directory = directory
        self.context = RunContext.from_env(directory)

    def path(self, step: int) -> str:
        return str(self.directory / f"global_step_{step}" / "actor")

    def install(
        self,
        engine: Any,
        phase: Callable[[str], None] | None = None,
        *,
        overlapped: bool = False,
        synchronizer: Any = None,
    ) -> Any:
        """Install our manager in the engine; ``phase`` is called at every phase of every save."""
        from trainsync.engines.verl.install import install_checkpoint_manager

        if phase is not None:
            failpoints.enable(failpoints.SAVE, phase)
        coordinator = CheckpointCoordinator(
            self.context.monitor,
            self.directory,
            rank=dist.get_rank(),
            world_size=dist.get_world_size(),
            overlapped=overlapped,
        )
        return install_checkpoint_manager(engine, self.context, synchronizer, coordinator)

    def synchronizer(self) -> Any:
        """The Synchronizer, made by rank 0, which claimed the attempt."""
        if dist.get_rank() == 0:
            self.context.synchronizer()
        dist.barrier()
        return self.context.synchronizer()

    def close(self) -> None:
        dist.barrier()
        self.context.close()
        failpoints.disable_all()
        dist.barrier()


def published(synchronizer: Any) -> int:
    """The version published by all ranks."""
    dist.barrier()
    version: int = ray.get(synchronizer.get_status.remote(), timeout=60).version
    dist.barrier()
    return version


def refusal(function: Callable[..., object], *args: Any, **kwargs: Any) -> tuple[str, str]:
    """(name, text) of the error of ``function``."""
    try:
        function(*args, **kwargs)
    except Exception as error:  # noqa: BLE001 - the test looks at it
        return type(error).__name__, str(error)
    return "", "nothing was raised"


# -- FSDP2: the whole life of a manager -------------------------------------------------------


def fsdp2(directory: Path, address: str) -> Results:
    stage = Stage(directory)
    ray.init(address=address, log_to_driver=False)
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


def differing(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> list[str]:
    names = set(found) ^ set(expected)
    shared = set(found) & set(expected)
    return sorted(names | {name for name in shared if not torch.equal(found[name], expected[name])})


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


# -- other engines ------------------------------------------------------------------------------


def others(directory: Path) -> Results:
    stage = Stage(directory)
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
    from trainsync.engines.fsdp import checkpoint_manager

    run = stage.run("merged")
    engine = stage.verl.make_engine(stage.model, lora_rank=4, lora_merged=True)
    sent: list[str] = []
    # Other tests cover the upload with a real Synchronizer.
    checkpoint_manager.fsdp_upload_state_dict = (  # type: ignore[assignment]
        lambda engine, synchronizer, version, logger: sent.append(str(engine.lora))
    )
    manager = run.install(engine, synchronizer=object())
    for step in (1, 2):
        stage.verl.train(engine, step)
    manager.save_state_dict(run.path(2), 2)
    manager.upload_state_dict(2)
    engine.save_checkpoint(run.path(2), global_step=2)
    results = {"sent": sent, "saved": stage.verl.fingerprint(engine)}
    weights = {name: tensor.cpu() for name, tensor in engine.get_per_tensor_param()[0]}
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
    found = load_file(output / "model.safetensors")
    names = sorted(found.keys() ^ weights.keys())
    # verl sends merged weights in bfloat16.
    return names + differing({n: t.to(weights[n].dtype) for n, t in found.items()}, weights)


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


# -- a rank that dies ------------------------------------------------------------------------------


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
