"""The example's TrainingRun must fit the example's program."""

import argparse
import shlex
from importlib.util import find_spec
from pathlib import Path

import tiny_grpo
import yaml
from tiny_grpo.config import Config
from trainsync.api.spec import Role, TrainingRunSpec

MANIFEST = Path(tiny_grpo.__file__).parent / "trainingrun.yaml"


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
