"""``python -m tests.faults [NAME …]``: inject faults and check that every promise holds.

Exit code 1 after a broken promise. Every broken trial is kept in build/faults/broken/ and can be
repeated with ``--seed`` (equal random draws, but not equal timing of processes).
"""

import argparse
import os
import secrets
import signal
import sys
import tempfile
from collections import Counter
from contextlib import ExitStack
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from tests.faults import report
from tests.faults.in_bucket import server
from tests.faults.pool import run_all
from tests.faults.report import Tally
from tests.faults.scenarios import ALL
from tests.faults.scenarios.of_buckets import OF_BUCKETS


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of: {', '.join(ALL)}")
    parser.add_argument("--times", type=int, default=200, help="how often each fault (200)")
    # Twice the cores: trials spend much time waiting.
    jobs = 2 * (os.cpu_count() or 1)
    parser.add_argument("--jobs", type=int, default=jobs, help=f"trials at once ({jobs})")
    parser.add_argument("--seed", type=int, help="play one trial again, of one NAME")
    parser.add_argument("--first", type=int, help="seed of the first trial (drawn at random)")
    parser.add_argument("--output", type=Path, default=report.RESULTS, help="for the results")
    return parser


def _write_begun(tallies: dict[str, Tally], planned: Counter[str], output: Path) -> None:
    """Write the results of faults that were not tried as often as asked: the run was ended."""
    for name, tally in tallies.items():
        if tally.times and planned[name]:
            report.write(tally, output)


def main() -> int:
    """Run, show, write; see the module's docstring."""
    parser = _parser()
    options = parser.parse_args()
    unknown = [name for name in options.names if name not in ALL]
    if unknown:
        parser.error(f"no scenario is called {unknown[0]!r}; there are: {', '.join(ALL)}")
    if options.times < 1 or options.jobs < 1:
        parser.error("--times and --jobs must be at least 1")
    if options.seed is not None and len(options.names) != 1:
        parser.error("--seed needs exactly one NAME")
    chosen = [ALL[name] for name in options.names or ALL]
    tallies = {scenario.name: Tally(scenario) for scenario in chosen}
    first = secrets.randbelow(10**9) if options.first is None else options.first
    todo = [
        (scenario, seed)
        for scenario in chosen
        if scenario.skipped is None
        for seed in (
            scenario.seeds(first, options.times) if options.seed is None else [options.seed]
        )
    ]
    planned = Counter(scenario.name for scenario, _ in todo)
    console = Console()
    for scenario in chosen:
        if scenario.skipped:
            console.print(f"[yellow]{scenario.name} is skipped: {scenario.skipped}[/]")
    columns = (
        TextColumn("{task.description:<22}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[broken]}"),
    )
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # exit with cleanup
    # Refreshed by hand: a refresh thread must not exist when workers are forked.
    with (
        tempfile.TemporaryDirectory(prefix="trainsync-faults-") as base,
        ExitStack() as running,
        Progress(*columns, console=console, auto_refresh=False) as progress,
    ):
        Path(base).chmod(0o755)
        if any(scenario in OF_BUCKETS for scenario in chosen):
            running.enter_context(server.shared(Path(base)))
        task = progress.add_task("", total=len(todo), broken="")
        broken = 0
        if options.seed is None:
            running.callback(_write_begun, tallies, planned, options.output)
        for result in run_all(
            todo, jobs=options.jobs, base=Path(base), kept=options.output / "broken"
        ):
            tally = tallies[result.name]
            tally.add(result)
            planned[result.name] -= 1
            if planned[result.name] == 0 and options.seed is None:
                report.write(tally, options.output)  # shown at once, before the other trials end
            if result.broken is not None:
                broken += 1
                why = escape(result.broken.strip().splitlines()[-1][:400])
                progress.console.print(
                    f"[red]{result.name} --seed {result.seed}[/] at {result.point}:\n"
                    f"  {why}\n  kept: {result.kept}",
                    highlight=False,
                )
            if progress.console.is_terminal or progress.tasks[0].completed % 100 == 0:
                progress.refresh()
            progress.update(
                task,
                advance=1,
                description=result.name,
                broken=f"[red]{broken} broken[/]" if broken else "",
            )
        progress.refresh()
    console.print(report.table(list(tallies.values())))
    if options.seed is None:
        for tally in tallies.values():
            if tally.scenario.skipped:
                report.write(tally, options.output)
        console.print(f"written to {options.output}", highlight=False)
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
