"""Damage on one rank: all ranks soon raise its kind and place, and no live state has changed."""

import re
import shutil
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from trainsync import Resume, RunContext, load_sharded
from trainsync.checkpoint.errors import CheckpointError, CorruptCheckpointError
from trainsync.storage.layout import RunDirectory

from tests.distributed.checkpoint.resume_job import Job, build_model
from tests.distributed.ranks import run_ranks, values_of

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(120)]

STEP = 2
MODEL = "actor/model_world_size_2_rank_1.pt"
OPTIM = "actor/optim_world_size_2_rank_1.pt"


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


# name → (damaged file, kind of damage, text in every rank's error)
DAMAGES: dict[str, tuple[str, Callable[[Path], None], str]] = {
    "flipped bit": (OPTIM, flip, "has digest xxh3-128:.* expected xxh3-128:"),
    "truncated": (MODEL, cut, r"has \d+ bytes, expected \d+"),
    "missing": (MODEL, Path.unlink, "is missing in"),
}


def damaged(resume: Resume, directory: Path, name: str) -> Resume:
    """The checkpoint with one file damaged, as it is found after it was opened."""
    path, damage, _ = DAMAGES[name]
    copy = directory / name.replace(" ", "_")
    if not copy.exists():
        temporary = copy.with_suffix(".tmp")
        shutil.copytree(resume.path, temporary)
        damage(temporary / path)
        temporary.rename(copy)
    return replace(resume, path=copy)


def attempt(job: Job, resume: Resume, **wanted: Any) -> str:
    """The error of loading it; the job's state must not change."""
    before = job.whole()
    started = time.monotonic()
    wanted = {"model": job.model, "optimizer": job.optimizer, "timeout": 60} | wanted
    try:
        load_sharded(resume, **wanted)
    except CheckpointError as error:
        assert time.monotonic() - started < 30
        assert job.whole() == before
        return f"{type(error).__name__}: {error}"
    return "loaded"


def meet_damage(directory: Path, copies: Path) -> dict[str, str]:
    job = Job(directory)
    job.run(STEP)
    resume = job.context.resume()
    assert resume is not None
    found = {}
    for name in DAMAGES:
        if job.rank == 0:
            damaged(resume, copies, name)
        torch.distributed.barrier()
        found[name] = attempt(job, damaged(resume, copies, name))
    # Only one rank asks for what was not saved.
    generators = {"mine": torch.Generator()} if job.rank == 1 else {}
    found["misfit"] = attempt(job, resume, generators=generators)
    found["whole"] = attempt(job, resume)
    job.close()
    if job.rank == 0:  # the other one has gone
        started = time.monotonic()
        with pytest.raises(CheckpointError) as caught:
            load_sharded(resume, model=job.model, timeout=1)
        found["gone"] = str(caught.value)
        assert time.monotonic() - started < 30
    return found


def test_every_rank_hears_which_file_of_which_rank_is_damaged(tmp_path: Path) -> None:
    (tmp_path / "copies").mkdir()
    first, second = values_of(run_ranks(meet_damage, tmp_path / "run", tmp_path / "copies"))
    for name, (path, _, why) in DAMAGES.items():
        file_name = re.escape(Path(path).name)
        assert re.match(rf"CorruptCheckpointError: step 2: .*{file_name}.*{why}", second[name]) or (
            re.match(rf"CorruptCheckpointError: step 2: {re.escape(path)} {why}", second[name])
        ), second[name]
        told = r"LoadFailedError: .* failed on rank 1: CorruptCheckpointError: .*"
        assert re.match(rf"{told}{file_name}.*{why}", first[name]), first[name]
    assert "has no generators" in second["misfit"]
    assert re.match(
        r"LoadFailedError: .* rank 1: StateMismatchError: .*generators", first["misfit"]
    )
    assert (first["whole"], second["whole"]) == ("loaded", "loaded")
    assert "rank 1: said nothing within 1 s" in first["gone"]

    # One process that needs only half of each file hears of a bit in the other half, too.
    with RunContext.from_env(tmp_path / "run", environ={}) as context:
        resume = context.resume()
    assert resume is not None
    assert resume.path == RunDirectory(tmp_path / "run").step(STEP)
    for name, (_, _, why) in DAMAGES.items():
        model = build_model()
        optimizer = torch.optim.AdamW(model.parameters())
        before = {key: value.clone() for key, value in model.state_dict().items()}
        with pytest.raises(CorruptCheckpointError, match=why):
            load_sharded(
                damaged(resume, tmp_path / "copies", name), model=model, optimizer=optimizer
            )
        assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
        assert not optimizer.state
