"""Parses the commands in the shell blocks of the documentation."""

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.unit.docs.pages import Block

_SEPARATORS = {"&&", "||", "|", ";", "&", "(", ")"}
_REDIRECTIONS = {">", ">>", "<", ">&", "<&"}
_ASSIGNMENT = re.compile(r"^[A-Za-z_]\w*=")
_SUBSTITUTION = re.compile(r"\$\(([^()]*)\)")


@dataclass(frozen=True)
class Command:
    """One program and its arguments; ``variables`` are set before it (``A=b make``)."""

    where: str
    program: str
    arguments: tuple[str, ...]
    variables: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.where}: {shlex.join([self.program, *self.arguments])}"


def commands(block: Block) -> list[Command]:
    """The commands of the block, also inside ``$(...)``."""
    return [command for line in typed(block) for command in split(line, block.where)]


def typed(block: Block) -> list[str]:
    """The lines that a reader types; with ``console``, those after ``$``."""
    lines = block.text.replace("\\\n", " ").splitlines()
    if block.language == "console":
        return [line.removeprefix("$ ") for line in lines if line.startswith("$ ")]
    return lines


def wants_a_cluster(command: Command) -> bool:
    """Whether the command reads or changes a cluster."""
    program = Path(command.program).name
    return program in {"kubectl", "helm"} or (
        program == "trainsync" and command.arguments[:1] == ("run",)
    )


def split(line: str, where: str) -> list[Command]:
    """The commands of one line.

    Raises:
        ValueError: a quote is not closed.
    """
    found = []
    while match := _SUBSTITUTION.search(line):
        found += split(match[1], where)
        line = line[: match.start()] + "SUBSTITUTED" + line[match.end() :]
    lexer = shlex.shlex(line, posix=True, punctuation_chars="();<>|&")
    lexer.whitespace_split = True
    found += [command for words in _simple(list(lexer)) if (command := _command(words, where))]
    return found


def _simple(tokens: list[str]) -> Iterator[list[str]]:
    words: list[str] = []
    skip = False
    for token in tokens:
        if skip or token in _REDIRECTIONS:
            skip = not skip
        elif token in _SEPARATORS:
            yield words
            words = []
        else:
            words.append(token)
    yield words


def _command(words: list[str], where: str) -> Command | None:
    count = next((n for n, word in enumerate(words) if not _ASSIGNMENT.match(word)), len(words))
    variables = tuple(word.partition("=")[0] for word in words[:count])
    if count == len(words):
        return None
    return Command(where, words[count], tuple(words[count + 1 :]), variables)
