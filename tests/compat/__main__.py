"""``python -m tests.compat [NAME …]``: the engines' tests with each verl and torch we support.

Without names all combinations run, with them those that have one in their name, such as
``verl-0.8``. Exit code 1 when a test failed in one. ``--lock`` resolves the lock files anew.
"""

import argparse
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from rich.console import Console

from tests.compat import report
from tests.compat.combinations import TESTS, Combination, chosen
from tests.compat.environments import Maker
from tests.compat.report import Result

_ROOT: Final = Path(__file__).resolve().parents[2]
_RESULTS: Final = Path("build/compat")
_FOLDERS: Final = ("worker_lib", "operator", "examples", "")
_SECONDS: Final = 3600.0  # limit of one combination; every test has its own deadline


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.compat", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="of combinations, or a part")
    parser.add_argument("--uv", type=Path, required=True, help="the program uv")
    parser.add_argument("--python", type=Path, required=True, help="the interpreter to use")
    parser.add_argument("--cache", type=Path, required=True, help="folder for environments")
    parser.add_argument("--lock", action="store_true", help="only write the lock files")
    return parser


def main() -> int:
    """Run, show; see the module's docstring."""
    parser = _parser()
    options = parser.parse_args()
    try:
        combinations = chosen(options.names)
    except ValueError as error:
        parser.error(str(error))
    maker = Maker(options.uv, options.python, options.cache)
    if options.lock:
        for combination in combinations:
            if not combination.locked:
                maker.write_lock(combination)
        return 0
    results = [run(combination, maker) for combination in combinations]
    Console().print(report.table(results))
    return 0 if all(result.good for result in results) else 1


def run(combination: Combination, maker: Maker) -> Result:
    """Run the tests in the combination's environment, and show their output."""
    # The environment of uv.lock is the one of this process.
    python = Path(sys.executable) if combination.locked else maker.environment(combination)
    print(f"\n{combination.name}", flush=True)
    outcome = _RESULTS / f"{combination.name}.xml"
    outcome.parent.mkdir(parents=True, exist_ok=True)
    outcome.unlink(missing_ok=True)
    path = os.pathsep.join(str(_ROOT / folder) for folder in _FOLDERS)
    tests = subprocess.Popen(
        [
            python, "-m", "pytest", "--quiet", "--disable-warnings", "-p", "no:cacheprovider",
            f"--junitxml={outcome}", *files(),
        ],
        # The environment does not have trainsync: the tests import this checkout's.
        env={**os.environ, "PYTHONPATH": path},
        cwd=_ROOT,
        start_new_session=True,
    )  # fmt: skip
    try:
        tests.wait(_SECONDS)  # the report names the failures
    except subprocess.TimeoutExpired:
        print(f"{combination.name}: not at an end after {_SECONDS:.0f} s", flush=True)
    finally:
        with contextlib.suppress(ProcessLookupError):  # none of them is left
            os.killpg(tests.pid, signal.SIGKILL)  # with its ranks
        tests.wait()
    return report.read(combination, outcome)


def files() -> Iterable[str]:
    """`TESTS` with its patterns resolved."""
    for pattern in TESTS:
        yield from sorted(str(path.relative_to(_ROOT)) for path in _ROOT.glob(pattern))


if __name__ == "__main__":
    sys.exit(main())
