"""``trainsync checkpoints repair``."""

import time
from typing import Annotated

import typer

from trainsync.api.protocol import SaveKind
from trainsync.api.words import clean
from trainsync.cli.options import DEFAULT_THREADS, AsJson, Directory, DryRun, Threads, open_run
from trainsync.cli.output.console import REFUSED, emit, guarded, say, stdout
from trainsync.cli.output.progress import bytes_bar
from trainsync.storage.inspect import leftovers as leftovers
from trainsync.storage.inspect import repair as mending
from trainsync.storage.inspect.activity import sign_of_life
from trainsync.storage.inspect.internal import in_internal, out_of_place
from trainsync.storage.inspect.repair import Action
from trainsync.storage.inspect.saves import check_all_sizes
from trainsync.storage.layout import RunDirectory


@guarded
def repair(
    directory: Directory,
    dry_run: DryRun = False,
    digest: Annotated[
        bool,
        typer.Option("--digest", help="Judge saves by their bytes, not sizes alone."),
    ] = False,
    threads: Threads = DEFAULT_THREADS,
    as_json: AsJson = False,
) -> None:
    """Mend what a crash left, and say each thing that is done. A valid save is never touched.

    A pointer that dangles or names a damaged save is moved to the newest valid one; temporary
    files older than an hour and ended leases are removed; a step that a crash kept from its place
    is put there; the trash is emptied. With --digest, a newer save with changed bytes is set
    aside: its manifest is renamed, so that no attempt resumes from it. Exit code 3 when a pointer
    has nothing valid left to name: it stays as it is.
    """
    run = open_run(directory)
    done = []
    for action in _places(run):
        done += _carry_out(action, dry_run=dry_run, quiet=as_json)
    # While a step is out of its place, the pointer that may name it cannot be judged.
    kinds = [kind for kind in SaveKind if kind is not SaveKind.STATE_DICT or not out_of_place(run)]
    with bytes_bar("reading", None) as tell:
        plan = mending.plan_pointers(
            run, kinds=kinds, with_digest=digest, threads=threads, on_bytes=tell
        )
    for action in [*plan.actions, *_cleanup(run)]:
        done += _carry_out(action, dry_run=dry_run, quiet=as_json)
    if as_json:
        emit(
            {
                "directory": str(directory),
                "dryRun": dry_run,
                "actions": [action.to_json_dict() for action in done],
                "refused": list(plan.refused),
            }
        )
    elif not done and not plan.refused:
        stdout().print("nothing to mend")
    for sentence in plan.refused:
        say(sentence, style="red")
    if plan.refused:
        raise typer.Exit(REFUSED)


def _carry_out(action: Action, *, dry_run: bool, quiet: bool) -> list[Action]:
    """The action, in a list, when it was (or in a dry run would be) done."""
    if dry_run:
        line = f"would do: {action.path}: {action.message}"
    elif action.do():
        line = f"{action.path}: {action.message}"
    else:
        say(f"{action.path}: has changed meanwhile and was left alone")
        return []
    if not quiet:
        stdout().print(clean(line), markup=False, soft_wrap=True)
    return [action]


def _places(run: RunDirectory) -> list[Action]:
    places = mending.plan_places(run)
    if places and (sign := sign_of_life(run, time.time())) is not None:
        # Its monitor may be between the two renames at this moment.
        say(f"a run seems to be at work ({sign}): what it has put aside is left to it")
        return []
    return places


def _cleanup(run: RunDirectory) -> list[Action]:
    saves = check_all_sizes(run)
    findings = [
        *leftovers.in_root(run),
        *leftovers.in_steps(run, saves),
        *leftovers.in_staging(run),
        *in_internal(run),
    ]
    return mending.plan_cleanup(run, findings, time.time())
