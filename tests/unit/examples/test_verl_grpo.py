"""The manifests of examples/verl_grpo are TrainingRuns, and verl knows every word of theirs."""

import importlib.util
import inspect
import re
import shlex
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from trainsync.api import env
from trainsync.api.spec import TrainingRunSpec
from trainsync.integrations.verl.options import SyncOptions

pytest.importorskip("hydra", reason="the extra `verl` is not installed")

EXAMPLE = Path(__file__).resolve().parents[3] / "examples" / "verl_grpo"
MANIFESTS = sorted(EXAMPLE.glob("*.yaml"))


def load(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load(path.read_text())
    return found


def composed(entrypoint: str) -> Any:
    """verl's configuration with the words of an entrypoint; a key that it lacks is refused."""
    from hydra import compose, initialize_config_dir

    spec = importlib.util.find_spec("verl")
    assert spec is not None
    assert spec.origin is not None
    words = shlex.split(entrypoint)
    assert words[:3] == ["python", "-m", "verl.trainer.main_ppo"]
    with initialize_config_dir(str(Path(spec.origin).parent / "trainer/config"), version_base=None):
        return compose("ppo_trainer", overrides=words[3:])


def test_the_image_gets_every_package_that_trainsync_needs() -> None:
    project = tomllib.loads((EXAMPLE.parents[1] / "pyproject.toml").read_text())["project"]
    needed = {re.match(r"[\w-]+", line)[0] for line in project["dependencies"]}  # type: ignore[index]
    shown = re.search(r"--no-deps \S+ && pip install (.+)", (EXAMPLE / "README.md").read_text())
    assert shown is not None
    assert set(shown[1].split()) == needed


def test_there_is_one_for_fsdp_and_one_for_megatron() -> None:
    assert [path.name for path in MANIFESTS] == ["fsdp.yaml", "megatron.yaml"]


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.stem)
def test_the_manifest_is_a_training_run_that_sends_weights_through_trainsync(path: Path) -> None:
    (cluster,) = TrainingRunSpec.model_validate(load(path)["spec"]).clusters
    config = composed(str(cluster.entrypoint))
    engine = config.actor_rollout_ref.rollout.checkpoint_engine
    assert engine.backend == "trainsync"
    assert importlib.util.find_spec(engine.custom_backend_module) is not None
    assert set(engine.engine_kwargs.trainsync) <= set(inspect.signature(SyncOptions.of).parameters)
    variables = yaml.safe_load(str(cluster.runtime_env_yaml))["env_vars"]
    assert variables["VERL_LOGGING_LEVEL"] == "WARN", "verl 0.9.1 raises where it logs of INFO"
    mini_batches = config.trainer.v1.separate_async.parameter_sync_step
    mini_batch = config.actor_rollout_ref.actor.ppo_mini_batch_size
    assert config.data.train_batch_size == mini_batches * mini_batch, "verl refuses anything else"


def test_fsdps_checkpoints_go_through_the_run() -> None:
    (cluster,) = TrainingRunSpec.model_validate(load(EXAMPLE / "fsdp.yaml")["spec"]).clusters
    config = composed(str(cluster.entrypoint))
    hook = config.actor_rollout_ref.model.external_lib
    assert hook == "trainsync.integrations.verl.checkpoints"
    assert importlib.util.find_spec(hook) is not None
    assert config.actor_rollout_ref.actor.checkpoint.async_save
    assert config.trainer.default_local_dir == f"${env.CHECKPOINT_DIR}"
    variables = yaml.safe_load(str(cluster.runtime_env_yaml))["env_vars"]
    total = config.trainer.total_training_steps
    assert variables["TRAINSYNC_VERL_TOTAL_STEPS"] == str(total)


def test_the_page_on_verl_shows_what_the_manifest_says() -> None:
    page = (EXAMPLE.parents[1] / "docs" / "use-with-verl.md").read_text()
    (shown,) = [block for block in page.split("```text\n")[1:] if block.startswith("python -m")]
    words = set(shlex.split(shown.split("```")[0].replace("\\\n", " ")))
    (cluster,) = load(EXAMPLE / "fsdp.yaml")["spec"]["clusters"]
    assert words <= set(shlex.split(cluster["entrypoint"]))


def test_megatrons_checkpoints_stay_out_of_the_runs_directory() -> None:
    run = load(EXAMPLE / "megatron.yaml")["spec"]
    config = composed(run["clusters"][0]["entrypoint"])
    assert config.actor_rollout_ref.model.external_lib is None, "it refuses Megatron's engine"
    volume = Path("/trainsync/checkpoints")
    directory = Path(config.trainer.default_local_dir)
    assert volume in directory.parents
    assert volume / run["checkpoint"]["path"] not in (directory, *directory.parents)
    assert "progressDeadlineSeconds" not in run["failurePolicy"], "nobody reports a step"


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.stem)
def test_the_pods_have_the_gpus_that_verl_is_told_of(path: Path) -> None:
    run = load(path)
    (cluster,) = run["spec"]["clusters"]
    config = composed(cluster["entrypoint"])
    told = {"trainer": config.trainer, "explorer": config.actor_rollout_ref.rollout}
    for group in cluster["groups"]:
        (container,) = group["template"]["spec"]["containers"]
        assert group["replicas"] == told[group["name"]].nnodes
        gpus = container["resources"]["limits"]["nvidia.com/gpu"]
        assert gpus == told[group["name"]].n_gpus_per_node
