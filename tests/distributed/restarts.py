"""What became of runs of `tests.distributed.killed_ranks`."""

from collections.abc import Iterator

from tests.distributed.tiny_run import Run


def pauses(run: Run) -> Iterator[tuple[str, float]]:
    """Each kill that was followed by a step, and the seconds from it to the end of that."""
    kill: tuple[str, float] | None = None
    for line in (run.history.parent / "times").read_text().splitlines():
        what, step, time = line.split()
        if what.startswith("kill"):
            kill = (f"{what}-{step}", float(time))
        elif what == "Step" and kill is not None:
            yield kill[0], float(time) - kill[1]
            kill = None
