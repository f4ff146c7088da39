"""Shared by all benchmarks: a figure with its goal, written to a file for the documentation.

Figures are ratios of two times measured in turn in the same run, because absolute times on a shared
machine vary.
"""

import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path

RESULTS = Path(__file__).resolve().parents[2] / "build" / "bench"


@dataclass(frozen=True)
class Figure:
    """One result. ``goal`` is such as ``<= 1.1`` or ``>= 0.9``, or ``-`` where there is none;
    ``details`` has the measurements."""

    name: str
    figure: float
    unit: str
    goal: str
    peer: str
    details: dict[str, float] = field(default_factory=dict)

    @property
    def met(self) -> bool:
        """Whether the goal is reached; True without a goal."""
        if self.goal == "-":
            return True
        sign, _, bound = self.goal.partition(" ")
        if sign not in ("<=", ">="):
            raise ValueError(f"{self.name}: goal {self.goal!r} must be -, or start with <= or >=")
        return self.figure <= float(bound) if sign == "<=" else self.figure >= float(bound)


def seconds(call: Callable[[], object]) -> float:
    """Wall time of one call."""
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def spread(name: str, values: Sequence[float]) -> dict[str, float]:
    """Minimum, median and maximum, for `Figure.details`."""
    return {
        f"{name}_min": min(values),
        f"{name}_median": statistics.median(values),
        f"{name}_max": max(values),
    }


def write(figure: Figure, directory: Path = RESULTS) -> Path:
    """``<name>.json`` in ``directory``."""
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / f"{figure.name}.json"
    record = asdict(figure) | {
        "met": figure.met,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": machine(),
    }
    path.write_text(json.dumps(record, indent=1) + "\n")
    return path


def machine() -> dict[str, object]:
    """The machine of a figure; a high load makes the figure unreliable."""
    model = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        names = [line for line in cpuinfo.read_text().splitlines() if line.startswith("model name")]
        model = names[0].partition(":")[2].strip() if names else model
    torch = sys.modules.get("torch")  # a benchmark without torch has nothing to do with a GPU
    gpu = torch is not None and torch.cuda.is_available()
    return {
        "cpu": model,
        "cores": os.cpu_count(),
        **({"gpu": torch.cuda.get_device_name()} if gpu else {}),
        "load_1_minute": round(os.getloadavg()[0], 1),
        "python": platform.python_version(),
        "kernel": platform.release(),
    }
