"""verl's real Ray workers and its real manager with our backend; a rollout is killed.

Four processes on gloo: two of verl's `ActorRolloutRefWorker`, with its FSDP engine and a tiny
Qwen2, and two of its `CheckpointEngineWorker`, in the resource pools that verl makes for them. What
takes the place of GPUs and of vLLM: verl's platform (`verl_grpo.cpu_platform`), the actor's process
group (`verl_on_cpus`), the inference engine behind the worker of a rollout (`verl_noted_rollout`),
and the replica's server (`Server`).
"""

import asyncio
import importlib.util
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.processes.forked import UNDER_VERL
from tests.distributed.processes.forked_workers import forking_python
from tests.distributed.small_ray.starting import small_ray

pytest.importorskip("verl.plugin.platform", reason="the extra `verl` is not installed")

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(480)]

REPOSITORY = Path(__file__).resolve().parents[3]
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "PYTHONPATH": ":".join(str(REPOSITORY / folder) for folder in ("worker_lib", "examples", "")),
    "VERL_PLATFORM": "cpu",
    "VERL_USE_EXTERNAL_MODULES": "verl_grpo.cpu_platform,tests.distributed.verl.verl_noted_rollout",
}
"""Of Ray's workers; the last two are verl's own way to take a platform, and plug-ins."""
SECONDS = 60.0
DEADLINE = 40
"""``timeout_seconds`` of a synchronisation."""


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator["Stage"]:
    import ray

    with small_ray():
        ray.init(
            address="local",
            num_cpus=16,
            num_gpus=4,  # verl counts them; there are none
            object_store_memory=100 << 20,
            include_dashboard=False,
            log_to_driver=False,
            runtime_env={"env_vars": ENVIRONMENT, "py_executable": forking_python(*UNDER_VERL)},
        )
    try:
        yield Stage(tmp_path_factory.mktemp("model"))
    finally:
        ray.shutdown()


def configuration(model: Path) -> Any:
    """verl's own, with the words that a user would add."""
    from hydra import compose, initialize_config_dir

    spec = importlib.util.find_spec("verl")
    assert spec is not None
    assert spec.origin is not None
    engine = "actor_rollout_ref.rollout.checkpoint_engine"
    options = {"timeout_seconds": DEADLINE, "host": "127.0.0.1", "same_host": False}
    words = [
        "actor_rollout_ref.hybrid_engine=False",
        f"actor_rollout_ref.model.path={model}",
        "actor_rollout_ref.model.use_remove_padding=False",
        "actor_rollout_ref.model.enable_gradient_checkpointing=False",
        "+actor_rollout_ref.model.override_config.attn_implementation=sdpa",
        "actor_rollout_ref.actor.strategy=fsdp2",
        "actor_rollout_ref.actor.use_torch_compile=False",
        "actor_rollout_ref.actor.fsdp_config.use_torch_compile=False",
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=2",
        "actor_rollout_ref.actor.optim.lr=1e-2",
        "actor_rollout_ref.actor.optim.total_training_steps=10",
        "actor_rollout_ref.rollout.name=noted",
        "actor_rollout_ref.rollout.tensor_model_parallel_size=1",
        "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=2",
        f"{engine}.backend=trainsync",
        f"{engine}.custom_backend_module=trainsync.integrations.verl.backend",
        *(f"+{engine}.engine_kwargs.trainsync.{name}={value}" for name, value in options.items()),
    ]
    with initialize_config_dir(str(Path(spec.origin).parent / "trainer/config"), version_base=None):
        return compose("ppo_trainer", overrides=words).actor_rollout_ref


class Server:
    """Replaces a replica's HTTP server; records the calls."""

    def __init__(self) -> None:
        self.told: list[str] = []

    def note(self, what: str) -> None:
        self.told.append(what)

    def abort_all_requests(self, reject_request: bool) -> None:
        self.note("abort_all_requests")

    def release_kv_cache(self) -> None:
        self.note("release_kv_cache")

    def resume_kv_cache(self) -> None:
        self.note("resume_kv_cache")

    def resume_generation(self) -> None:
        self.note("resume_generation")

    def all(self) -> list[str]:
        return self.told


class Stage:
    """Trainers, rollouts and a manager, as verl's trainer makes them."""

    def __init__(self, model: Path) -> None:
        import ray
        from verl.checkpoint_engine import CheckpointEngineManager
        from verl.single_controller.ray import (
            RayClassWithInitArgs,
            RayWorkerGroup,
            ResourcePoolManager,
        )
        from verl.utils.config import omega_conf_to_dataclass
        from verl.workers.rollout.replica import RolloutReplica
        from verl_grpo.tiny_qwen2 import build_model

        from tests.distributed.verl.verl_on_cpus import ActorOnCPU

        class Replica(RolloutReplica):  # type: ignore[misc]
            async def launch_servers(self) -> None:
                self.servers = [ray.remote(Server).options(num_cpus=0).remote()]

        self.ray = ray
        build_model().save_pretrained(model)
        config = configuration(model)
        pools = ResourcePoolManager(resource_pool_spec={"actor": [2]}, mapping={})
        pools.create_resource_pool()
        self.actors = RayWorkerGroup(
            resource_pool=pools.resource_pool_dict["actor"],
            ray_cls_with_init=RayClassWithInitArgs(
                cls=ray.remote(ActorOnCPU), config=config, role="actor"
            ),
            device_name="cpu",
        )
        self.replicas = [Replica(n, config.rollout, config.model, 1) for n in range(2)]
        for replica in self.replicas:
            asyncio.run(replica.init_standalone())
        self.actors.init_model()
        engine = omega_conf_to_dataclass(config.rollout.checkpoint_engine)
        self.manager = CheckpointEngineManager(engine, self.actors, self.replicas)

    def on(self, worker: Any, function: Callable[[Any], Any]) -> Any:
        """Call ``function`` with the worker's object, in its process."""
        return self.ray.get(worker.__ray_call__.remote(function), timeout=SECONDS)

    def digest(self) -> str:
        """Of the trainers' weights, after one more step."""
        from tests.distributed.verl.verl_on_cpus import train_and_digest

        calls = [worker.__ray_call__.remote(train_and_digest) for worker in self.actors.workers]
        digests = self.ray.get(calls, timeout=SECONDS)
        assert len(set(digests)) == 1
        return str(digests[0])

    def got(self, replica: Any) -> dict[int, str]:
        """Step -> digest of the weights given to the replica's inference engine."""
        return dict(self.on(replica.workers[0], lambda worker: worker.server_adapter.got))

    def told(self, replica: Any) -> list[str]:
        return list(self.ray.get(replica.servers[0].all.remote(), timeout=SECONDS))


def test_the_others_get_their_weights_when_a_rollout_is_killed(stage: Stage) -> None:
    first = stage.digest()
    metrics = stage.manager.update_weights(1)
    assert metrics["trainsync/weight_sync/served"] == 2
    assert [stage.got(replica) for replica in stage.replicas] == [{1: first}] * 2
    assert stage.told(stage.replicas[0])[-2:] == ["resume_kv_cache", "resume_generation"]

    survivor, victim = stage.replicas
    second = stage.digest()
    assert second != first

    def doom(worker: Any) -> None:
        worker.server_adapter.doomed = True

    stage.on(victim.workers[0], doom)
    started = time.monotonic()
    with pytest.raises(stage.ray.exceptions.RayActorError):
        stage.manager.update_weights(2)
    while 2 not in stage.got(survivor):
        assert time.monotonic() - started < DEADLINE + 10, "the survivor did not get version 2"
        time.sleep(0.05)  # polling interval
    assert stage.got(survivor) == {1: first, 2: second}
    # verl raises before it tells the rollouts to go on; the next synchronisation does.
    assert stage.told(survivor)[-1] == "release_kv_cache"

    third = stage.digest()
    stage.manager.remove_replicas([victim])
    metrics = stage.manager.update_weights(3)
    assert metrics["trainsync/weight_sync/served"] == 1
    assert stage.got(survivor)[3] == third
    assert stage.told(survivor)[-2:] == ["resume_kv_cache", "resume_generation"]
