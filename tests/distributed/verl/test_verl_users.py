"""verl's trainer and the monitor are different users of one group, and the umask is 022."""

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from trainsync.api.protocol import SaveKind
from trainsync.storage.layout import RunDirectory
from trainsync.storage.saves.manifest import check_manifest, committed_steps, read_manifest

from tests.distributed.processes.forked import UNDER_VERL, preload
from tests.distributed.verl.trainer import seen_by, shorter, verls_trainer
from tests.distributed.verl.users import MONITOR, SECONDS, TRAINER, Process, acting, place, volume
from tests.ports import port_of, reserved_port
from tests.waiting import eventually

pytest.importorskip("verl", reason="the extra `verl` is not installed")

pytestmark = [
    pytest.mark.distributed,
    pytest.mark.timeout(300),
    pytest.mark.skipif(os.geteuid() != 0, reason="acting as other users needs root"),
]
preload(*UNDER_VERL)

LAST = 2
CHECKPOINT = SaveKind.CHECKPOINT


def monitor(connection: Connection, directory: Path) -> None:
    """Claims the run, sends the others the data to join, and runs until told to end."""
    from trainsync import RunContext

    os.environ["TRAINSYNC_CHECKPOINT_MAX_TO_KEEP"] = "1"
    with RunContext.from_env(directory) as context:
        connection.send((context.env(), None))
        connection.recv()


def joined(environ: dict[str, str], port: int) -> Any:
    """torch.distributed and verl for a rank of one; returns how the tests make engines."""
    import torch.distributed as dist

    os.environ.update(environ, TRAINSYNC_VERL_TOTAL_STEPS=str(LAST))
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=0, world_size=1)
    from tests.distributed.verl import verl_cpu

    return verl_cpu


def saves_by_itself(
    connection: Connection, environ: dict[str, str], directory: Path, port: int
) -> str:
    """verl's engine saves; before its bytes are written, verl makes the step's directory."""
    verl_cpu = joined(environ, port)
    from trainsync import RunContext, failpoints, install_checkpoint_manager
    from trainsync.checkpoint.coordinator import CheckpointCoordinator
    from verl.utils.fs import local_mkdir_safe

    verl_cpu.make_model(Path("hf"))
    engine = verl_cpu.make_engine(Path("hf"))
    made = threading.Event()

    def phase(name: str) -> None:
        if name == "opened":
            made.wait(60)

    context = RunContext.from_env()
    failpoints.enable(failpoints.SAVE, phase)
    coordinator = CheckpointCoordinator(context.monitor, directory)
    manager = install_checkpoint_manager(engine, context, coordinator=coordinator)
    verl_cpu.train(engine, 1)
    engine.save_checkpoint(str(directory / "global_step_1" / "actor"), None, 1)
    folder = local_mkdir_safe(str(directory / "global_step_1"))
    Path(folder, "data.pt").write_bytes(b"of verl's trainer")
    made.set()
    manager.wait_on_save_thread(60)
    return str(verl_cpu.fingerprint(engine))


@dataclass(frozen=True)
class Shared:
    """A run claimed by a monitor with another user."""

    home: Path
    directory: Path
    environ: dict[str, str]
    """What joins the run."""

    @property
    def run(self) -> RunDirectory:
        return RunDirectory(self.directory)

    @contextmanager
    def trainer(self, function: Callable[..., Any], *more: Any) -> Iterator[Process]:
        """A process of the trainer's user."""
        with reserved_port() as reservation:
            arguments = (self.environ, self.directory, port_of(reservation), *more)
            with acting(TRAINER, self.home, function, *arguments) as process:
                yield process

    def by_trainer(self, function: Callable[..., Any], *more: Any) -> Any:
        """What ``function`` returns in a process of the trainer's user."""
        with self.trainer(function, *more) as process:
            return process.hear()


@pytest.fixture
def shared() -> Iterator[Shared]:
    with place() as around:
        directory = volume(around)
        with acting(MONITOR, around / "monitor", monitor, directory) as process:
            yield Shared(around / "trainer", directory, process.hear())
            process.tell("end")
            process.hear()


def test_a_step_is_committed_though_verl_makes_its_directory(shared: Shared) -> None:
    shared.by_trainer(saves_by_itself)
    committed = read_manifest(shared.run, CHECKPOINT, 1).manifest
    check_manifest(shared.run, committed, with_digest=True)


def trains(
    connection: Connection, environ: dict[str, str], directory: Path, port: int
) -> dict[str, Any]:
    """Two steps, each saved by verl's trainer; the next batch of its data after them."""
    verl_cpu = joined(environ, port)
    trainer, engines = verls_trainer(verl_cpu, directory, "critic", "actor")
    batches = iter(trainer.train_dataloader)
    for step in range(1, LAST + 1):
        next(batches)
        for engine in engines.values():
            verl_cpu.train(engine, step)
        trainer.global_steps = step
        trainer._save_checkpoint()
    return seen_by(verl_cpu, trainer, engines, batches)


def resumes(
    connection: Connection,
    environ: dict[str, str],
    directory: Path,
    port: int,
    models: tuple[str, ...] = ("critic", "actor"),
) -> dict[str, Any]:
    """What verl's trainer goes on from, in another process."""
    verl_cpu = joined(environ, port)
    trainer, engines = verls_trainer(verl_cpu, directory, *models)
    trainer._load_checkpoint()
    seen = seen_by(verl_cpu, trainer, engines, iter(trainer.train_dataloader))
    return seen | {"refused": refused_with_other_data(trainer)}


def refused_with_other_data(trainer: Any) -> str:
    """What verl's trainer is told that loads once more, with an item less."""
    from trainsync.data.errors import DataMismatchError

    trainer.train_dataloader = shorter(trainer.train_dataloader)
    try:
        trainer._load_checkpoint()
    except DataMismatchError as error:
        return str(error)
    return ""


def saves_when_asked(
    connection: Connection, environ: dict[str, str], directory: Path, port: int
) -> list[str]:
    """What the ends of two steps do; a save is asked for in the second one."""
    verl_cpu = joined(environ, port)
    from trainsync.integrations.verl import stop_requests

    trainer, engines = verls_trainer(verl_cpu, directory, "actor")
    done: list[str] = []
    trainer.timing_raw = {}
    trainer.checkpoint_manager = SimpleNamespace(
        update_weights=lambda step: done.append(f"weights {step}")
    )
    words: list[str] = []

    def state() -> str:
        word = words.pop(0) if words else "unknown"
        done.append(word)
        return word

    setattr(stop_requests, "state", state)  # noqa: B010 - not for mypy
    trainer._load_checkpoint()
    for step, asked in ((1, []), (2, ["wait", "wait", "go"])):
        verl_cpu.train(engines["actor"], step)
        trainer.global_steps, words[:] = step, asked
        trainer.on_step_end()
    engines["actor"].checkpoint_manager.wait_on_save_thread(SECONDS)
    return done


def killed(connection: Connection, environ: dict[str, str], directory: Path, port: int) -> None:
    """Killed when step 2's models are staged and its data is written, before the last word."""
    verl_cpu = joined(environ, port)
    trainer, engines = verls_trainer(verl_cpu, directory, "actor")
    batches = iter(trainer.train_dataloader)
    next(batches)
    trainer.global_steps = 1
    trainer._save_checkpoint()
    engines["actor"].checkpoint_manager.wait_on_save_thread(SECONDS)
    save = trainer.actor_rollout_wg.save_checkpoint

    def save_checkpoint(path: str, *args: Any, **kwargs: Any) -> None:
        if Path(path).name == "trainer":
            written = Path(path).with_name("data.pt").exists()
            engines["actor"].checkpoint_manager.coordinator.wait_all(SECONDS)
            connection.send((written, None))
            os.kill(os.getpid(), signal.SIGKILL)
        save(path, *args, **kwargs)

    trainer.actor_rollout_wg.save_checkpoint = save_checkpoint
    connection.send((next(batches).tolist(), None))
    trainer.global_steps = 2
    trainer._save_checkpoint()


@contextmanager
def transfer_queue() -> Iterator[Any]:
    """TransferQueue in a Ray of this user's own, as verl's trainer starts it."""
    import ray
    import transfer_queue as tq

    from tests.distributed.small_ray.starting import small_ray

    with small_ray():
        ray.init(
            address="local",
            num_cpus=4,
            include_dashboard=False,
            object_store_memory=100 << 20,
            _temp_dir=str(Path.home() / "r"),  # a socket's path must be short
            _plasma_directory=str(Path.home()),  # /dev/shm may be root's alone
        )
    try:
        tq.init()
        yield tq
        tq.close()
    finally:
        ray.shutdown()


def saves_prompts(
    connection: Connection, environ: dict[str, str], directory: Path, port: int
) -> dict[str, Any]:
    """A save in an asynchronous mode, with prompts that are under way."""
    import torch
    from tensordict import TensorDict

    verl_cpu = joined(environ, port)
    with transfer_queue() as tq:
        trainer, _ = verls_trainer(verl_cpu, directory, "actor")
        trainer.trainer_mode, trainer.global_steps = "separate_async", LAST
        prompts = TensorDict({"input_ids": torch.arange(12).reshape(3, 4)}, batch_size=[3])
        tags = [{"is_prompt": True, "status": "finished"}] * 3
        tq.kv_batch_put(["a", "b", "c"], "train", fields=prompts, tags=tags)
        trainer._save_checkpoint()
        return dict(tq.kv_list("train"))


def resumes_prompts(
    connection: Connection, environ: dict[str, str], directory: Path, port: int
) -> dict[str, Any]:
    """What an asynchronous trainer finds in its queue after a resume."""
    verl_cpu = joined(environ, port)
    with transfer_queue() as tq:
        trainer, _ = verls_trainer(verl_cpu, directory, "actor")
        trainer.trainer_mode = "separate_async"
        trainer._load_checkpoint()
        return dict(tq.kv_list("train"))


def test_verls_trainer_saves_actor_critic_and_its_data_in_one_commit_and_resumes_from_it(
    shared: Shared,
) -> None:
    pytest.importorskip("transfer_queue", reason="verl's trainer imports it")
    ended = shared.by_trainer(trains)
    committed = read_manifest(shared.run, CHECKPOINT, LAST).manifest
    check_manifest(shared.run, committed, with_digest=True)
    names = {str(participant) for participant in committed.participants}
    parts = {"optim.0", "extra_state.0", "trainer.0"}
    assert names == parts | {"critic_model.0", "critic_optim.0", "critic_extra_state.0"}
    paths = {entry.path for entry in committed.files}
    models = {f"{model}/model_world_size_1_rank_0.pt" for model in ("actor", "critic")}
    assert {"data.pt", "data_length.json"} | models <= paths
    eventually(lambda: shared.run.steps() == [LAST], SECONDS)  # retention takes the data, too
    folders = [str(shared.directory / f"global_step_{step}") for step in (1, LAST)]
    assert (ended["told"], ended["directory"]) == (folders, str(shared.directory))
    assert not list((shared.directory / ".trainsync" / "trainer").iterdir())
    resumed = shared.by_trainer(resumes)
    assert (resumed["step"], resumed["next"]) == (LAST, ended["next"])
    assert resumed["models"] == ended["models"]
    assert "trained on 20 items until step 2, and verl's dataset has 19" in resumed["refused"]


def test_a_step_without_verls_data_does_not_count_and_the_one_before_goes_on_with_its_own(
    shared: Shared,
) -> None:
    pytest.importorskip("transfer_queue", reason="verl's trainer imports it")
    with shared.trainer(killed) as process:
        second_batch = process.hear()
        assert process.hear(), "verl had written its data"
    resumed = shared.by_trainer(resumes, ("actor",))
    assert (resumed["step"], resumed["next"]) == (1, second_batch)


def test_verls_trainer_saves_before_it_wakes_its_rollouts_where_that_is_asked_for(
    shared: Shared,
) -> None:
    done = shared.by_trainer(saves_when_asked)
    first, second = ["unknown", "weights 1"], ["wait", "wait", "go", "unknown", "weights 2"]
    assert done == [*first, *second]
    assert committed_steps(shared.run, CHECKPOINT) == [2]


def test_verls_transfer_queue_is_in_the_commit_and_comes_back(shared: Shared) -> None:
    pytest.importorskip("transfer_queue", reason="verl's asynchronous modes use it")
    saved = shared.by_trainer(saves_prompts)
    assert len(saved["train"]) == 3
    committed = read_manifest(shared.run, CHECKPOINT, LAST).manifest
    check_manifest(shared.run, committed, with_digest=True)
    paths = {entry.path for entry in committed.files}
    assert {
        "data.pt",
        "transfer_queue/metadata.json",
        "transfer_queue/controller_state.pkl",
    } < paths
    assert any(path.startswith("transfer_queue/simple_storage/") for path in paths)
    assert shared.by_trainer(resumes_prompts) == saved
