"""Exit codes, the streams of the output, and errors in one sentence, for all commands.

On stdout is what was asked for (with ``--json`` one document and nothing else); all the rest is
on stderr.
"""

import functools
import json
import os
import sys
from collections.abc import Callable, Mapping
from typing import Final, NoReturn, ParamSpec, TypeVar

import typer
from rich.console import Console

from trainsync.api.words import clean
from trainsync.storage.errors import StorageError

DAMAGED: Final = 1
USAGE: Final = 2
REFUSED: Final = 3
INTERRUPTED: Final = 130  # as shells have it: 128 + SIGINT

EXIT_CODES: Final = (
    "Exit codes: 0 all is well; 1 something is damaged; 2 wrong usage; 3 refused, or it could not "
    "be done."
)

_Parameters = ParamSpec("_Parameters")
_Result = TypeVar("_Result")


class CommandError(Exception):
    """Ends a command with one sentence that names the remedy.

    Args:
        code: the exit code.
    """

    def __init__(self, text: str, code: int = REFUSED) -> None:
        super().__init__(text)
        self.code = code


class _Console(Console):
    def on_broken_pipe(self) -> None:
        raise BrokenPipeError  # `guarded` sees to it; rich would end with 1, which says "damaged"


def stdout() -> Console:
    """Where tables go. 80 columns where there is no terminal."""
    return _Console(highlight=False)


def stderr() -> Console:
    """Where everything else goes."""
    return _Console(stderr=True, highlight=False)


def say(text: str, style: str = "") -> None:
    """A sentence on stderr, which the terminal shows and never obeys."""
    stderr().print(clean(text), style=style, markup=False, soft_wrap=True)


def fail(text: str, code: int = REFUSED) -> NoReturn:
    """End with a sentence on stderr."""
    say(text, style="red")
    raise typer.Exit(code)


def emit(document: Mapping[str, object]) -> None:
    """The one JSON document of a command, on stdout."""
    typer.echo(json.dumps(document, indent=1))


def can_ask() -> bool:
    """Whether a person can answer a question here."""
    return sys.stdin.isatty()


def guarded(command: Callable[_Parameters, _Result]) -> Callable[_Parameters, _Result]:
    """Turn what the volume or a person does amid a command into a sentence and an exit code."""

    @functools.wraps(command)
    def run(*args: _Parameters.args, **kwargs: _Parameters.kwargs) -> _Result:
        try:
            return command(*args, **kwargs)
        except BrokenPipeError:
            # The reader has gone (`| head`): no reader is left. Python must not complain of
            # it a second time when it flushes stdout at its end.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise typer.Exit(INTERRUPTED) from None
        except OSError as error:
            fail(_sentence(error))
        except StorageError as error:
            fail(str(error))
        except CommandError as error:
            fail(str(error), error.code)
        except (KeyboardInterrupt, typer.Abort):  # the latter at a question
            fail("interrupted", INTERRUPTED)

    return run


def _sentence(error: OSError) -> str:
    what = error.strerror or str(error) or type(error).__name__
    return f"{error.filename}: {what}" if error.filename is not None else what
