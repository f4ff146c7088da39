"""The example under Ray with an endpoint: driver, ranks and explorers add to one trace a step."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from tiny_grpo.config import Config
from trainsync.api import env

from tests.distributed.processes.forked_workers import forked_python, forked_workers
from tests.unit.tracing.receiver import Span, receiving

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(600)]

CONFIG = Config(steps=3, digits=2, hidden_size=32, layers=1, base_steps=4, base_batch=16, prompts=8)
# What each step has; see `trainsync.tracing.steps`.
EACH_STEP = {"rl.loop", "rl.train", "rl.sample", "rl.reward", "trainsync.wait", "trainsync.save"}


def test_each_step_is_one_trace_of_driver_ranks_and_explorers(tmp_path: Path) -> None:
    with receiving() as receiver:
        environ = os.environ | {
            **forked_workers(),
            "OTEL_EXPORTER_OTLP_ENDPOINT": receiver.url,
            "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
            "OMP_NUM_THREADS": "1",
            env.CHECKPOINT_INTERVAL: "1",
        }
        environ.pop("RAY_ADDRESS", None)
        command = [*forked_python(), "-m", "tiny_grpo.train", "--directory", str(tmp_path / "run")]
        log = tmp_path / "log"
        with log.open("wb") as file:
            code = subprocess.run(
                [*command, *CONFIG.arguments()], env=environ, stdout=file, stderr=file, timeout=500
            ).returncode
        assert code == 0, log.read_text()[-4000:]
        traces = receiver.traces()
    for step in (1, 2, 3):
        spans = traces[step]
        assert {span.name for span in spans} >= EACH_STEP
        (root,) = [span for span in spans if not span.parent]
        assert root.name == "rl.loop"
        ids = {span.id for span in spans}
        assert all(span.parent in ids for span in spans if span is not root)
        assert _of(spans, "trainsync.save", "trainsync.rank") == set(range(CONFIG.trainers))
        assert _of(spans, "rl.sample", "trainsync.explorer") == {
            f"explorer-{index}" for index in range(CONFIG.explorers)
        }
    # The weights of a step, published by ranks and taken by explorers, are in its trace, too.
    assert {"rl.sync", "trainsync.take"} <= {span.name for span in traces[1]}
    assert len({span.resource["process.pid"] for span in traces[1]}) >= 3


def _of(spans: list[Span], name: str, attribute: str) -> set[object]:
    return {span.attributes[attribute] for span in spans if span.name == name}
