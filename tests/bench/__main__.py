"""``python -m tests.bench [NAME]``: run all benchmarks, or those with NAME in the file's name."""

import argparse
import importlib
import sys
from collections.abc import Iterable
from pathlib import Path

from tests.bench.harness import Figure, write


def benchmarks(name: str | None) -> list[str]:
    """Modules to run, such as ``tests.bench.weights.bench_delta``, in order."""
    found = sorted(
        f"tests.bench.{path.parent.name}.{path.stem}"
        for path in Path(__file__).parent.glob("*/bench_*.py")
    )
    chosen = [module for module in found if name is None or name in _stem(module)]
    if not chosen:
        there = ", ".join(map(_stem, found))
        raise SystemExit(f"no benchmark is called {name!r}; there are: {there}")
    return chosen


def _stem(module: str) -> str:
    return module.rpartition(".")[2]


def main() -> int:
    """Print and write every figure; returns 1 if a goal is missed."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench", description=__doc__)
    parser.add_argument("name", nargs="?", help="part of a benchmark's file name")
    missed = 0
    for module in benchmarks(parser.parse_args().name):
        print(f"{_stem(module)} ...", flush=True)
        figures: Iterable[Figure] = importlib.import_module(module).run()
        for figure in figures:
            path = write(figure)
            verdict = "met" if figure.met else "MISSED"
            print(
                f"  {figure.name}: {figure.figure:.3f} {figure.unit} "
                f"(goal {figure.goal} {verdict}; against {figure.peer})\n"
                + "".join(f"    {key} = {value:.4g}\n" for key, value in figure.details.items())
                + f"    {path}",
                flush=True,
            )
            missed += not figure.met
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
