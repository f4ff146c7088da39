"""Measure the tolerance of `vllm_grpo.trainer`: ``VLLM_ENV=… python -m vllm_grpo.measure``.

A server on the CPU takes versions that are steps of training apart, and is asked for the canaries
of each. Do the same with a model and servers of your own: the tolerance is of that pair.
"""

import contextlib
import itertools
import os
import tempfile
from pathlib import Path
from typing import Final

from tiny_grpo.policy.rollout import sample
from tiny_grpo.policy.task import make_prompts
from trainsync import RunContext
from trainsync.engines.servers.vllm import VLLMServer
from trainsync.weights.proof.asking import ask
from trainsync.weights.proof.comparing import minus, sizes
from trainsync.weights.proof.tolerance import measured_tolerance
from trainsync.weights.staging.area import StagingArea

from vllm_grpo.local_servers import SETTINGS, LocalServer
from vllm_grpo.model_folder import write_model
from vllm_grpo.train import make_config
from vllm_grpo.trainer import Trainer, make_canaries

_VERSIONS: Final = 30
_SECONDS: Final = 480.0


def main() -> None:
    """Print the tolerance and, beside it, how far a step moves the log-probabilities."""
    config = make_config(_VERSIONS)
    canaries = make_canaries(config)
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        model, run, vllm = folder / "model", folder / "run", Path(os.environ["VLLM_ENV"])
        local = LocalServer("server", vllm, write_model(model, config), run, folder, SETTINGS)
        stack.callback(local.close)
        local.start()
        ctx = stack.enter_context(RunContext.from_env(run, environ=SETTINGS))
        trainer = Trainer(ctx, config, None)
        local.wait(_SECONDS, ready=False)
        server = stack.enter_context(VLLMServer(local.at.url))
        area = StagingArea()
        stack.callback(area.close)
        trained, served = [], []
        for version in range(_VERSIONS):
            server.update(version, area.stage(version, dict(trainer.model.state_dict())))
            trained.append(ask(trainer.model, canaries))
            served.append(server.logprobs(canaries))
            off = sizes(minus(served[-1], trained[-1]))
            print(f"version {version}: median {off[0]:.1e}, rms {off[1]:.1e}, largest {off[2]:.1e}")
            prompts = make_prompts(config.digits, config.seed, "measure", range(config.prompts))
            trainer.train(sample(trainer.model, prompts, config.group_size, version))
        moves = [sizes(minus(new, old))[1] for old, new in itertools.pairwise(trained)]
    print(measured_tolerance(trained, served))
    print(f"a step moves log-probabilities by {min(moves):.1e} … {max(moves):.1e} (rms)")


if __name__ == "__main__":
    main()
