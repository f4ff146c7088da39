"""Two ranks of torch.distributed (gloo) save, are killed, and load again."""

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.tensor
import xxhash
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from trainsync import RunContext, all_ranks, load_rank_shard
from trainsync.api.protocol import SaveKind
from trainsync.checkpoint.errors import SaveTimeoutError
from trainsync.checkpoint.save import part_writer
from trainsync.checkpoint.save.files import stream
from trainsync.checkpoint.save.places import volume
from trainsync.storage import atomic
from trainsync.storage.layout import RunDirectory
from trainsync.storage.saves.manifest import check_manifest, committed_steps, read_manifest
from trainsync.storage.saves.pointers import read_pointer

from tests.distributed.ranks import run_ranks, values_of

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(180)]

WORLD_SIZE = 2
COMPONENTS = ("model", "optim")


# -- the tests ------------------------------------------------------------------------------


def assert_committed(directory: Path, steps: list[int]) -> None:
    """Exactly ``steps`` are committed, whole to the last bit, and the pointer names the newest."""
    run = RunDirectory(directory)
    assert run.steps() == steps
    assert committed_steps(run, SaveKind.CHECKPOINT) == steps
    for step in steps:
        manifest = read_manifest(run, SaveKind.CHECKPOINT, step).manifest
        assert len(manifest.files) == 2 * WORLD_SIZE
        check_manifest(run, manifest, with_digest=True)
    assert read_pointer(run, SaveKind.CHECKPOINT) == steps[-1]


def test_what_two_ranks_committed_is_loaded_bit_for_bit_by_the_next_attempt(
    tmp_path: Path,
) -> None:
    saved = values_of(run_ranks(train, tmp_path, 4))
    assert [result["attempt"] for result in saved] == [0, 0]
    assert saved[0]["incarnation"] == saved[1]["incarnation"]
    assert_committed(tmp_path, [2, 4])
    loaded = values_of(run_ranks(resume, tmp_path))
    for before, after in zip(saved, loaded, strict=True):
        assert (after["attempt"], after["step"]) == (1, 4)
        assert after["digest"] == before["digests"][4]  # parameters and moments, bit for bit
    # The shards make up the model without any process group, as verl's merger reads them.
    shards = [
        torch.load(
            tmp_path / f"global_step_4/actor/model_world_size_2_rank_{rank}.pt", weights_only=True
        )
        for rank in range(WORLD_SIZE)
    ]
    full = torch.cat([shard["0.weight"].to_local() for shard in shards])
    assert full.shape == shards[0]["0.weight"].shape


def test_a_resumed_run_goes_on_as_if_it_had_never_stopped(tmp_path: Path) -> None:
    whole = values_of(run_ranks(train, tmp_path / "whole", 6))
    values_of(run_ranks(train, tmp_path / "cut", 4))
    rest = values_of(run_ranks(train, tmp_path / "cut", 6))
    for uninterrupted, resumed in zip(whole, rest, strict=True):
        assert resumed["first_step"] == 5
        assert resumed["losses"] == uninterrupted["losses"][4:]
        assert resumed["digests"][6] == uninterrupted["digests"][6]


# Where rank 1 is killed (see `arm_kill`) → whether its part was complete, and the save commits.
KILLS = {
    "in the file": False,
    "before the rename": False,
    "before the receipt": False,
    "in the receipt": False,
    "before the monitor is told": True,
}


@pytest.mark.parametrize("where", KILLS)
def test_a_rank_killed_in_a_save_never_commits_anything_torn(tmp_path: Path, where: str) -> None:
    survivor, victim = run_ranks(killed, tmp_path, where)
    assert victim.exit_code == -signal.SIGKILL, victim.error
    assert survivor.error is None
    committed = KILLS[where]
    assert survivor.value == ("committed" if committed else "the monitor says registered")
    assert_committed(tmp_path, [2, 4] if committed else [2])
    # The next attempt starts from there, and the remains of the killed one do not matter to it.
    rest = values_of(run_ranks(train, tmp_path, 6))
    assert [result["first_step"] for result in rest] == [5 if committed else 3] * 2
    assert_committed(tmp_path, [2, 4, 6])


# -- the ranks ------------------------------------------------------------------------------


def digest(*states: Any) -> str:
    """Of every local tensor's bytes, in order."""
    hasher = xxhash.xxh3_128()

    def visit(value: Any) -> None:
        if isinstance(value, dict):
            for key in sorted(value, key=str):
                hasher.update(str(key).encode())
                visit(value[key])
        elif isinstance(value, list):
            for item in value:
                visit(item)
        elif isinstance(value, torch.Tensor):
            local = value.to_local() if isinstance(value, DTensor) else value
            hasher.update(local.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data)
        else:
            hasher.update(repr(value).encode())

    for state in states:
        visit(state)
    return str(hasher.hexdigest())


class Job:
    """A tiny FSDP2 training that is the same at every start, saving every second step."""

    def __init__(self, directory: Path) -> None:
        dist.init_process_group("gloo")
        self.rank = dist.get_rank()
        self.context = RunContext.from_env(directory)
        self.coordinator = self.context.coordinator()
        torch.manual_seed(0)
        # 7 rows over 2 ranks make shards of different sizes; 1 row leaves rank 1 with nothing.
        self.model = torch.nn.Sequential(
            torch.nn.Linear(5, 7),
            torch.nn.BatchNorm1d(7),
            torch.nn.Tanh(),
            torch.nn.Linear(7, 1),
        )
        for layer in (self.model[0], self.model[3]):
            fully_shard(layer)
        fully_shard(self.model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.05)
        self.first_step = 1
        resume = self.context.resume()
        if resume is not None:
            # Moments need a place to be loaded into.
            self.train(0)
            for name, target in (("model", self.model), ("optim", self.optimizer)):
                target.load_state_dict(
                    load_rank_shard(resume, name, rank=self.rank, world_size=WORLD_SIZE)
                )
            self.first_step = resume.step + 1

    def train(self, step: int) -> float:
        generator = torch.Generator().manual_seed(100 * step + self.rank)
        loss = self.model(torch.randn(8, 5, generator=generator)).square().mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.item()

    def digest(self) -> str:
        return digest(self.model.state_dict(), self.optimizer.state_dict())

    def save(self, step: int) -> None:
        self.coordinator.save_async("model", self.model.state_dict(), step)
        self.coordinator.save_async("optim", self.optimizer.state_dict(), step)

    def commit(self, step: int, timeout: float = 60) -> None:
        participants = all_ranks(*COMPONENTS, world_size=WORLD_SIZE)
        asyncio.run(
            self.coordinator.register_and_monitor(
                step, checkpoint_participants=participants, timeout=timeout
            )
        )


def train(directory: Path, last: int) -> dict[str, Any]:
    job = Job(directory)
    losses, digests = [], {}
    for step in range(job.first_step, last + 1):
        losses.append(job.train(step))
        if step % 2 == 0:
            digests[step] = job.digest()
            job.save(step)  # the next step changes everything while this is being written
            if job.rank == 0:
                participants = all_ranks(*COMPONENTS, world_size=WORLD_SIZE)
                job.coordinator.register(step, checkpoint_participants=participants)
    job.coordinator.wait_all(60)
    if job.rank == 0:
        job.commit(last)
    dist.barrier()
    job.context.close()
    return {
        "attempt": job.context.attempt,
        "incarnation": job.context.incarnation,
        "first_step": job.first_step,
        "losses": losses,
        "digests": digests,
    }


def resume(directory: Path) -> dict[str, Any]:
    job = Job(directory)
    dist.barrier()
    job.context.close()
    return {"attempt": job.context.attempt, "step": job.first_step - 1, "digest": job.digest()}


def arm_kill(where: str) -> None:
    """Kill this process at a point of its next save."""

    def kill(*args: object, **kwargs: object) -> Any:
        os.kill(os.getpid(), signal.SIGKILL)

    if where == "in the file":
        original = stream.DigestingFile.write

        def half(self: Any, data: Any) -> Any:
            original(self, memoryview(data)[: len(data) // 2])
            return kill()

        stream.DigestingFile.write = half  # type: ignore[method-assign]
    elif where == "before the rename":
        Path.replace = kill  # type: ignore[method-assign]
    elif where == "before the receipt":
        volume.receipts.write_receipt = kill  # type: ignore[assignment]
    elif where == "in the receipt":

        def torn(path: Path, data: bytes) -> Path:
            atomic.temporary_name(path).write_bytes(data[: len(data) // 2])
            return kill()  # type: ignore[no-any-return]

        atomic._write_temporary = torn
    elif where == "before the monitor is told":
        report = part_writer.PartWriter.report

        def reported(writer: Any) -> bool:
            # The monitor may still have to be told of the part before.
            return bool(kill() if writer.participant.component == "optim" else report(writer))

        part_writer.PartWriter.report = reported  # type: ignore[method-assign]
    else:
        raise ValueError(where)


def killed(directory: Path, where: str) -> str:
    job = Job(directory)
    for step in (1, 2, 3, 4):
        job.train(step)
        if step == 2:
            job.save(2)
            job.coordinator.wait_all(60)
            if job.rank == 0:
                job.commit(2)
    if job.rank == 1:
        # The optimizer's part comes last: everything else of the save is complete by then.
        job.coordinator.save_sync("model", job.model.state_dict(), 4)
        arm_kill(where)
        job.coordinator.save_sync("optim", job.optimizer.state_dict(), 4)
        # A thread sends the hint to the monitor, and the kill may hit that thread.
        job.coordinator.wait_all(60)
        signal.sigtimedwait([], 60)
        raise AssertionError("still alive")
    job.save(4)
    job.coordinator.wait_all(60)
    try:
        job.commit(4, timeout=20 if KILLS[where] else 4)
    except SaveTimeoutError as error:
        return str(error).rpartition(": ")[2]
    finally:
        job.context.close(timeout=1)  # the killed rank writes nothing more
    return "committed"
