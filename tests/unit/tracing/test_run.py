"""A run of one process: what the library records of its steps by itself."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from trainsync.runtime.context import RunContext
from trainsync.tracing import steps

from tests.unit.tracing.receiver import Span, receiving


def test_steps_and_saves_of_a_run_are_traces(
    tmp_path: Path, send_to: Callable[[str], None]
) -> None:
    def committed(spans: list[Span]) -> bool:
        return sum(span.name == "trainsync.save.commit" for span in spans) == 2

    with receiving() as receiver:
        send_to(receiver.url)
        with RunContext.from_env(tmp_path / "run") as ctx:
            coordinator = ctx.coordinator()
            for step in (1, 2):
                with ctx.span("rl.reward", step, prompts=4):
                    pass
                coordinator.save_async("model", {"w": torch.arange(1000)}, step)
                coordinator.register(step, checkpoint_participants=[("model", 0)])
                ctx.report(step, 2)
            ctx.report(2, 2)  # again, at the end: no second span
            coordinator.finish(2, timeout=30)
            receiver.wait(committed)
        assert steps.flush(20)
        traces = receiver.traces()
    assert set(traces) == {1, 2}
    for spans in traces.values():
        by_name = {span.name: span for span in spans}
        save = [
            "trainsync.save",
            *(f"trainsync.save.{part}" for part in ("commit", "stage", "write")),
        ]
        assert sorted(span.name for span in spans) == ["rl.loop", "rl.reward", *save]
        step, whole = by_name["rl.loop"], by_name["trainsync.save"]
        assert step.parent == ""
        for name in ("rl.reward", "trainsync.save", "trainsync.save.commit"):
            assert by_name[name].parent == step.id
        for name in ("trainsync.save.stage", "trainsync.save.write"):
            assert by_name[name].parent == whole.id
            assert whole.began <= by_name[name].began + 1e-3
            assert by_name[name].ended <= whole.ended + 1e-3
        assert whole.attributes["trainsync.save.bytes"] >= 8000
        assert step.resource["trainsync.run"] == "run" and step.resource["trainsync.attempt"] == 0
    assert traces[1][0].trace != traces[2][0].trace


def test_without_an_endpoint_opentelemetry_is_not_loaded(tmp_path: Path) -> None:
    code = f"""
import sys
import trainsync
with trainsync.RunContext.from_env({str(tmp_path / "run")!r}) as ctx:
    with ctx.span("rl.reward", 1):
        ctx.coordinator().save_sync("model", {{"n": 1}}, 1)
    ctx.coordinator().register(1, checkpoint_participants=[("model", 0)])
    ctx.report(1)
sys.exit(", ".join(name for name in sys.modules if name.startswith("opentelemetry")) or 0)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
