"""How ``repair`` carries out one action, and says so."""

from trainsync.api.words import clean
from trainsync.cli.output.console import say, stdout
from trainsync.storage.inspect.repair import Action


def carry_out(action: Action, *, dry_run: bool, quiet: bool) -> list[Action]:
    """The action, in a list, when it was (or in a dry run would be) done.

    Raises:
        OSError, StorageError: the place refuses.
    """
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
