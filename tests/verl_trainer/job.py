"""One start of ``python -m verl.trainer.main_ppo`` on this machine, in the environment of
``make verl-env``, with a Ray of its own."""

import os
import re
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tests.environments import environment_of

ROOT: Final = Path(__file__).resolve().parents[2]
SECONDS: Final = 900.0
"""Limit of one start; on an idle machine it takes 90 s, most of them imports."""

_END_SECONDS: Final = 60.0
_HERE: Final = "tests.verl_trainer"
_LIBRARIES: Final = (
    f"{_HERE}.engines_on_cpus",
    f"{_HERE}.newer_vllm",
    "trainsync.integrations.verl.checkpoints",
)
_ENGINE: Final = "actor_rollout_ref.rollout.checkpoint_engine"
_PROMPTS: Final = 8

COLOCATED: Final = ("trainer.v1.trainer_mode=sync",)
"""vLLM beside the trainer, which sends weights in verl's own way."""

APART: Final = (
    "trainer.v1.trainer_mode=separate_async",
    "trainer.v1.separate_async.parameter_sync_step=1",
    "actor_rollout_ref.hybrid_engine=False",
    "actor_rollout_ref.rollout.nnodes=1",
    "actor_rollout_ref.rollout.n_gpus_per_node=1",
    f"{_ENGINE}.backend=trainsync",
    f"{_ENGINE}.custom_backend_module=trainsync.integrations.verl.backend",
    f"+{_ENGINE}.engine_kwargs.trainsync.rollout_dtype=bfloat16",
)
"""vLLM in processes that the trainer shares nothing with, and our backend of weights."""


@dataclass(frozen=True)
class Ended:
    """What a start left.

    Attributes:
        code: the exit code.
        steps: the numbers that verl logged, by global step.
        tail: the end of the log.
    """

    code: int
    steps: dict[int, dict[str, float]]
    tail: str


def verl_environment() -> Path:
    """See `environment_of`."""
    return environment_of("VERL_ENV", "verl", "test-verl-trainer")


def make_task(folder: Path) -> None:
    """Write the model and the prompts of `tests.verl_trainer.task`."""
    command = [verl_environment() / "bin/python", "-m", f"{_HERE}.task", folder]
    subprocess.run(command, env=_environment(folder), check=True, timeout=SECONDS)


def train(
    task: Path,
    run: Path,
    steps: int,
    mode: Sequence[str],
    log: Path,
    *,
    killed_after: int | None = None,
) -> Ended:
    """Train up to ``steps``, from where ``run`` is; returns when verl has ended.

    Args:
        task: the folder of `make_task`.
        run: the run's directory.
        mode: `COLOCATED` or `APART`.
        killed_after: once verl has logged this step, kill all of its processes and Ray's.
    """
    # A short name: the paths of Ray's sockets must have fewer than 108 characters.
    temporary = Path(tempfile.mkdtemp(prefix="rv", dir="/tmp"))
    command = [verl_environment() / "bin/python", "-u", "-m", "verl.trainer.main_ppo"]
    try:
        with log.open("w") as output:
            trainer = subprocess.Popen(
                [*command, *_options(task, run, steps, temporary), *mode],
                cwd=task,
                env=_environment(run),
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                _wait(trainer, log, killed_after)
            finally:
                trainer.kill()
                code = trainer.wait()
    finally:
        _end_all_of(temporary)
        shutil.rmtree(temporary, ignore_errors=True)
    said = log.read_text(errors="replace")
    return Ended(code, _logged(said), said[-6000:])


def _environment(run: Path) -> dict[str, str]:
    own = ("TRAINSYNC_", "RAY_", "PYTEST_", "VLLM_", "VERL_")
    return {k: v for k, v in os.environ.items() if not k.startswith(own)} | {
        "PATH": f"{verl_environment() / 'bin'}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": os.pathsep.join(
            str(folder) for folder in (ROOT, ROOT / "examples", ROOT / "worker_lib")
        ),
        "TRAINSYNC_CHECKPOINT_DIR": str(run),
        "VERL_PLATFORM": "cpu",
        "VERL_USE_EXTERNAL_MODULES": f"{_HERE}.on_cpus",
        # Of INFO verl 0.9.1 writes a line that raises: v1/trainer_separate_async.py:181.
        "VERL_LOGGING_LEVEL": "WARN",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_NO_USAGE_STATS": "1",
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "HYDRA_FULL_ERROR": "1",
        "RAY_AUTH_MODE": "disabled",  # else a token would be left in the home directory
        "RAY_USAGE_STATS_ENABLED": "0",
    }


def _options(task: Path, run: Path, steps: int, temporary: Path) -> list[str]:
    actor, rollout = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
    model, ray = "actor_rollout_ref.model", "ray_kwargs.ray_init"
    return [
        "algorithm.adv_estimator=grpo",
        f"data.train_files={task / 'data.parquet'}",
        f"data.val_files={task / 'data.parquet'}",
        f"data.train_batch_size={_PROMPTS}",
        "data.max_prompt_length=32",
        "data.max_response_length=16",
        "data.dataloader_num_workers=0",
        f"reward.custom_reward_function.path={Path(__file__).with_name('task.py')}",
        "reward.num_workers=1",
        f"{model}.path={task / 'model'}",
        f"{model}.external_lib=[{','.join(_LIBRARIES)}]",
        f"{model}.use_remove_padding=False",
        f"{model}.enable_gradient_checkpointing=False",
        f"+{model}.override_config.attn_implementation=sdpa",
        f"{actor}.strategy=fsdp2",
        f"{actor}.use_torch_compile=False",
        f"{actor}.fsdp_config.use_torch_compile=False",
        f"{actor}.optim.lr=1e-2",
        f"{actor}.ppo_mini_batch_size={_PROMPTS}",
        f"{actor}.ppo_micro_batch_size_per_gpu=8",
        f"{actor}.checkpoint.async_save=True",
        f"{rollout}.name=vllm",
        f"{rollout}.n=8",
        f"{rollout}.tensor_model_parallel_size=1",
        f"{rollout}.log_prob_micro_batch_size_per_gpu=8",
        f"{rollout}.max_model_len=64",
        f"{rollout}.max_num_seqs=32",
        f"{rollout}.max_num_batched_tokens=256",
        f"{rollout}.enforce_eager=True",
        f"{rollout}.free_cache_engine=False",
        f"{rollout}.agent.num_workers=1",
        f"{_ENGINE}.update_weights_bucket_megabytes=16",
        # vLLM refuses to sleep on a CPU.
        f"+{rollout}.enable_sleep_mode=False",
        f"+{rollout}.engine_kwargs.vllm.worker_extension_cls={_HERE}.vllm_on_cpus.WorkerExtension",
        "transfer_queue.backend.SimpleStorage.num_data_storage_units=1",
        "trainer.device=cpu",
        "trainer.nnodes=1",
        "trainer.n_gpus_per_node=1",
        f"trainer.total_training_steps={steps}",
        "trainer.save_freq=1",
        "trainer.val_before_train=False",
        "trainer.logger=[console]",
        f"trainer.default_local_dir={run}",
        # Ray counts GPUs that are not there, one for each worker.
        f"{ray}.num_cpus=16",
        f"+{ray}.num_gpus=4",
        f"+{ray}.address=local",
        f"+{ray}._temp_dir={temporary}",
        f"+{ray}.include_dashboard=False",
        f"+{ray}.object_store_memory=300000000",
    ]


def _logged(said: str) -> dict[int, dict[str, float]]:
    """verl's lines ``step:7 - name:value - …``."""
    steps = {}
    for found in re.finditer(r"step:(\d+) - (.*)", said):
        pairs = (pair.rsplit(":", 1) for pair in found[2].split(" - "))
        numbers = {}
        for name, value in (pair for pair in pairs if len(pair) == 2):
            with suppress(ValueError):  # not every value is a number
                numbers[name] = float(re.sub(r"^np\.\w+\((.*)\)$", r"\1", value.strip()))
        steps[int(found[1])] = numbers
    return steps


def _wait(trainer: subprocess.Popen[bytes], log: Path, killed_after: int | None) -> None:
    """Until it has ended, has logged the step, or has taken too long."""
    end = time.monotonic() + SECONDS
    while trainer.poll() is None and time.monotonic() < end:
        if killed_after in _logged(log.read_text(errors="replace")):
            return
        time.sleep(0.2)  # polling interval


def _end_all_of(temporary: Path) -> None:
    """Kill all processes of the Ray that has its files there, and wait for their end.

    Raises:
        TimeoutError: some do not end.
    """
    deadline = time.monotonic() + _END_SECONDS
    while found := [process for process in _processes() if _has_open(process, temporary)]:
        for process in found:
            with suppress(ProcessLookupError):
                os.kill(int(process.name), signal.SIGKILL)
        if time.monotonic() > deadline:
            raise TimeoutError(f"processes {[process.name for process in found]} do not end")
        time.sleep(0.1)  # polling interval


def _processes() -> list[Path]:
    return [folder for folder in Path("/proc").iterdir() if folder.name.isdigit()]


def _has_open(process: Path, folder: Path) -> bool:
    """Whether a process has a file in the folder open, as all of Ray's have, and vLLM's."""
    with suppress(OSError):  # it has ended meanwhile
        return any(
            opened.readlink().is_relative_to(folder) for opened in (process / "fd").iterdir()
        )
    return False
