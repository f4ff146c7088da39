"""The pages of the documentation, and the blocks of code on them.

A comment before a block selects the tests of the block::

    <!-- test: file train.py -->     the block is that file, for the blocks that are run
    <!-- test: run -->               run it (bash), in a fresh directory for each page
    <!-- test: run fails -->         it must end with an exit code other than 0
    <!-- test: run shows "text" -->  and its output must have the text in it
    <!-- test: cluster -->           its commands are run, one by one, with a cluster
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[3]
_FENCE = re.compile(r"^(?P<indent> *)```(?P<language>[\w+-]*)(?P<rest>.*)$")
_DIRECTIVE = re.compile(r"^<!-- test: (?P<text>.+?) -->$")


@dataclass(frozen=True)
class Block:
    """A fenced block: ``language`` may be empty; ``directive`` is that of the comment before it."""

    page: Path
    line: int
    language: str
    text: str
    directive: str = ""

    @property
    def where(self) -> str:
        """For messages and test ids: the page and the line at which the block begins."""
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def pages() -> list[Path]:
    """Every page that people read, generated ones included."""
    found = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")]
    for part in ("charts", "devcluster", "examples", "images"):
        found += (ROOT / part).glob("**/*.md")
    return sorted(found)


def blocks(page: Path) -> list[Block]:
    """The fenced blocks of ``page``, in order.

    Raises:
        ValueError: a fence is not closed.
    """
    found: list[Block] = []
    directive = ""
    lines = iter(enumerate(page.read_text().splitlines(), 1))
    for number, line in lines:
        if match := _DIRECTIVE.match(line):
            directive = match["text"]
            continue
        if fence := _FENCE.match(line):
            body = _body(lines, fence["indent"], f"{page}:{number}")
            found.append(Block(page, number, fence["language"], body, directive))
        if line.strip():
            directive = ""
    return found


def prose(page: Path) -> str:
    """The page without its blocks, with the same number of lines."""
    kept, fenced = [], False
    for line in page.read_text().splitlines():
        fence = _FENCE.match(line) is not None
        kept.append("" if fenced or fence else line)
        fenced = fenced != fence
    return "\n".join(kept)


def all_blocks(*languages: str) -> list[Block]:
    """The blocks of all pages that are in one of ``languages``."""
    return [block for page in pages() for block in blocks(page) if block.language in languages]


def _body(lines: Iterator[tuple[int, str]], indent: str, where: str) -> str:
    body: list[str] = []
    for _, line in lines:
        if line.strip() == "```":
            return "\n".join(body) + "\n"
        body.append(line.removeprefix(indent))
    raise ValueError(f"{where}: the block is not closed")
