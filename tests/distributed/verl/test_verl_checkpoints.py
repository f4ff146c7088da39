"""verl's engine saves through the run because verl imports ``external_lib``, and nothing else."""

import os
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from trainsync.api.protocol import SaveKind
from trainsync.storage.layout import RunDirectory
from trainsync.storage.saves.manifest import check_manifest, read_manifest
from trainsync.storage.saves.pointers import read_pointer

from tests.distributed.ranks import run_ranks, values_of
from tests.distributed.verl.scenarios.stage import Stage, refusal

pytest.importorskip("verl", reason="the extra `verl` is not installed")

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(300)]

HOOK = "trainsync.integrations.verl.checkpoints"
LAST = 2
POINTER_SECONDS = 60.0


def hooked(directory: Path) -> dict[str, Any]:
    """Two steps, each saved; then another engine, which loads the last one."""
    run = RunDirectory(directory / "run")
    os.environ["TRAINSYNC_CHECKPOINT_DIR"] = str(run.root)
    os.environ["TRAINSYNC_VERL_TOTAL_STEPS"] = str(LAST)
    stage = Stage(directory)
    engine = stage.verl.make_engine(stage.model, external_lib=HOOK)
    for step in range(1, LAST + 1):
        stage.verl.train(engine, step)
        engine.save_checkpoint(str(run.root / f"global_step_{step}" / "actor"), None, step)
    # Rank 0 waits for the commit, the others for their own files: verl waits for all ranks.
    committed = stage.rank > 0 or run.manifest(SaveKind.CHECKPOINT, LAST).exists()
    seen = {
        "manager": type(engine.checkpoint_manager).__module__,
        "committed": committed,
        "pointer": wait_for_pointer(run, LAST),
        "at the end": stage.verl.fingerprint(engine),
    }
    again = stage.verl.make_engine(stage.model, external_lib=HOOK)
    again.load_checkpoint(str(run.root / f"global_step_{LAST}" / "actor"))
    seen["loaded"] = stage.verl.fingerprint(again)
    return seen | refused()


def wait_for_pointer(run: RunDirectory, step: int) -> int | None:
    """Wait for the pointer, which moves after the manifest that ends a wait for the commit."""
    deadline = time.monotonic() + POINTER_SECONDS
    while (found := read_pointer(run, SaveKind.CHECKPOINT)) != step:
        if time.monotonic() > deadline:
            break
        time.sleep(0.02)  # polling interval
    return found


def refused() -> dict[str, Any]:
    """The hook's error for engines whose saves bypass the run."""
    from verl.workers.engine import BaseEngine, EngineRegistry

    @EngineRegistry.register(model_type="language_model", backend="other", device="cpu")
    class OtherEngine(BaseEngine):  # type: ignore[misc]
        def __init__(self, forward_only: bool) -> None:
            self.engine_config = SimpleNamespace(forward_only=forward_only)

    def new(forward_only: bool) -> Any:
        return EngineRegistry.new("language_model", "other", forward_only=forward_only)

    return {
        "other": refusal(new, False),
        "reference": refusal(new, True),
    }


def test_saves_are_committed_and_the_last_one_before_it_returns(tmp_path: Path) -> None:
    for seen in values_of(run_ranks(hooked, tmp_path, seconds=200)):
        assert seen["manager"] == "trainsync.engines.fsdp.checkpoint_manager"
        assert seen["committed"], "the last save returned before it was committed"
        assert seen["pointer"] == LAST
        assert seen["loaded"] == seen["at the end"]
        assert seen["other"][0] == "ValueError"
        assert "external_lib of OtherEngine; expected verl's FSDPEngine or" in seen["other"][1]
        assert seen["reference"][0] == ""
    run = RunDirectory(tmp_path / "run")
    check_manifest(run, read_manifest(run, SaveKind.CHECKPOINT, LAST).manifest, with_digest=True)


@pytest.mark.usefixtures("ray_cluster")
def test_what_verls_trainer_wrote_reaches_a_rank_of_another_process_by_ray(tmp_path: Path) -> None:
    import ray
    from trainsync.integrations.verl import stored_run

    step = tmp_path / "global_step_3"
    files = {"data.pt": b"of the dataloader", "transfer_queue/a/b.pkl": b"of the queue"}
    for name, data in {**files, "actor/model.pt": b"of a rank"}.items():
        path = step / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    carried = stored_run.carried(step)
    assert isinstance(carried.files, ray.ObjectRef), "the bytes go once, however many the ranks"

    @ray.remote(num_cpus=0)
    def of_a_rank(given: Any) -> dict[str, bytes]:
        return dict(given.get())

    assert ray.get(of_a_rank.remote(carried), timeout=60) == files
