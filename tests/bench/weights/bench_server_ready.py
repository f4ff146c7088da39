"""How much longer a server starts that must have the run's current version: ``vllm serve``, 0.5 GB.

Ours is from the start of a real ``vllm serve`` (on the CPU) and of its agent, at once, until the
agent's ``/readyz`` says that the server has the version that the run committed; the server begins
with the weights of its folder, which are others. The peer is vLLM's own start: the same server
without agent and without our engine, until its ``/health`` (asked every 0.2 s) answers. Both by
turns, in either order; a start before them warms up. The figure is the median of the rounds'
differences. The details have ours split at its own ``/health``.

Needs ``make vllm-env`` and its folder as ``VLLM_ENV``.
"""

import os
import statistics
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Final

from tests.bench.harness import Figure, spread
from tests.bench.weights.bench_vllm_update import SHAPE
from tests.ports import port_of, reserved_port
from tests.unit.agent.runs import Run
from tests.vllm.support.agent_process import AgentProcess
from tests.vllm.support.server import environment, serve, vllm_environment
from tests.vllm.support.tiny_model import make_dense, version_of

ROUNDS: Final = int(os.environ.get("TRAINSYNC_BENCH_ROUNDS", "3"))
_VERSION: Final = 4


def run() -> list[Figure]:
    """`server_ready_with_current_weights_seconds`."""
    times: dict[str, list[float]] = {"own": [], "ready": [], "health_with_agent": []}
    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        model = make_dense(scratch / "model", **SHAPE)
        directory = _committed(scratch / "run", model)
        _own_start(model, scratch)
        for number in range(ROUNDS):
            for way in sorted(("own", "ready"), reverse=number % 2 == 1):
                if way == "own":
                    times["own"].append(_own_start(model, scratch))
                    continue
                health, ready = _start_with_agent(model, scratch, directory)
                times["health_with_agent"].append(health)
                times["ready"].append(ready)
    added = [ours - own for ours, own in zip(times["ready"], times["own"], strict=True)]
    times["ready_after_health"] = [
        ours - health
        for ours, health in zip(times["ready"], times["health_with_agent"], strict=True)
    ]
    details = {"rounds": float(ROUNDS)} | spread("added_seconds", added)
    for name, values in times.items():
        details |= spread(f"{name}_seconds", values)
    return [
        Figure(
            "server_ready_with_current_weights_seconds",
            statistics.median(added),
            "s more than the peer",
            "-",
            "vLLM's own start with the weights of its folder",
            details,
        )
    ]


def _committed(directory: Path, model: Path) -> Path:
    """The directory of a run that has committed a version and ended."""
    run = Run(directory)
    run.start()
    try:
        run.commit(_VERSION, version_of(model, _VERSION))
    finally:
        run.stop()
    return directory


def _own_start(model: Path, scratch: Path) -> float:
    """Seconds of a start without agent."""
    started = time.perf_counter()
    server = serve(model, scratch, engine=False)
    seconds = time.perf_counter() - started
    server.stop()
    return seconds


def _start_with_agent(model: Path, scratch: Path, directory: Path) -> tuple[float, float]:
    """Seconds of a start with an agent: until the server answers, and until it is ready."""
    python = vllm_environment() / "bin" / "python"
    variables = environment(scratch / "plugin")
    with ExitStack() as stack:
        reserved = stack.enter_context(reserved_port())
        url = f"http://127.0.0.1:{port_of(reserved)}"
        started = time.perf_counter()
        agent = AgentProcess(python, variables, ["--server", url, "--directory", directory])
        stack.callback(agent.stop)
        stack.callback(serve(model, scratch, reserved=reserved).stop)
        health = time.perf_counter() - started
        agent.until_ready_with(_VERSION)
        return health, time.perf_counter() - started
