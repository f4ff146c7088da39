"""The example's TrainingRun must fit the example's program."""

import argparse
import shlex
from importlib.util import find_spec
from pathlib import Path

import tiny_grpo
import vllm_grpo
import yaml
from tiny_grpo.config import Config
from trainsync.api import env
from trainsync.api.spec import Role, TrainingRunSpec
from vllm_grpo.local_servers import SETTINGS

MANIFEST = Path(tiny_grpo.__file__).parent / "trainingrun.yaml"
WITH_SERVERS = Path(vllm_grpo.__file__).parent / "trainingrun.yaml"


def test_its_entrypoint_starts_the_example_with_as_many_actors_as_it_has_pods() -> None:
    spec = TrainingRunSpec.model_validate(yaml.safe_load(MANIFEST.read_text())["spec"])
    (cluster,) = spec.clusters
    assert cluster.entrypoint is not None
    python, flag, module, *options = shlex.split(cluster.entrypoint)
    assert (python, flag) == ("python", "-m")
    assert find_spec(module) is not None
    parser = argparse.ArgumentParser()
    Config.add_arguments(parser)
    config = Config.from_arguments(parser.parse_args(options))
    pods = {group.role: group.replicas for group in cluster.groups}
    assert pods == {Role.TRAINER: config.trainers, Role.EXPLORER: config.explorers}
    # The demo kills a trainer after the third commit; there must be training left then.
    assert config.steps > 5 * spec.checkpoint.interval


def test_the_run_with_servers_says_what_the_same_demo_without_a_cluster_does() -> None:
    spec = TrainingRunSpec.model_validate(yaml.safe_load(WITH_SERVERS.read_text())["spec"])
    settings = {
        env.SYNC_METHOD: spec.sync.method,
        env.SYNC_STYLE: spec.sync.style,
        env.SYNC_INTERVAL: str(spec.sync.interval),
        env.SYNC_MAX_STALENESS: str(spec.sync.max_staleness),
        env.CHECKPOINT_INTERVAL: str(spec.checkpoint.interval),
    }
    assert settings == SETTINGS
    (cluster,) = spec.clusters
    python, flag, module, *_ = shlex.split(cluster.entrypoint or "")
    assert (python, flag) == ("python", "-m")
    assert find_spec(module) is not None
    (servers,) = spec.servers
    (prepare,) = servers.template["spec"]["initContainers"]
    assert find_spec(prepare["command"][2]) is not None
