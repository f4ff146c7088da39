"""Generates the table of values in the chart's README.md from the comments of values.yaml.

A key with a comment becomes a row, together with its nested keys; a key without one is a group.
"""

import json
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import yaml

CHART: Final = Path(__file__).parent / "trainsync-operator"
_BEGIN: Final = "<!-- values: made by `make chart-readme` -->\n"
_END: Final = "<!-- values: end -->\n"
_KEY = re.compile(r"^( *)([A-Za-z][A-Za-z0-9]*):")


@dataclass(frozen=True)
class Value:
    """One row: the value's path, default and description."""

    path: tuple[str, ...]
    default: Any
    meaning: str


def read_values(text: str) -> Iterator[Value]:
    """The documented values of a values.yaml, in its order.

    Raises ValueError for a value that has no comment.
    """
    defaults = yaml.safe_load(text)
    path: list[str] = []
    comment: list[str] = []
    # Deeper lines belong to the last row.
    row_indent: int | None = None
    for line in text.splitlines():
        stripped = line.strip()
        if stripped.startswith("#"):
            comment.append(stripped.removeprefix("#").strip())
            continue
        found = _KEY.match(line)
        if not found:
            comment = []
            continue
        indent = len(found[1])
        if row_indent is not None and indent > row_indent:
            continue
        row_indent = None
        path = [*path[: indent // 2], found[2]]
        default = _at(defaults, path)
        if comment:
            row_indent = indent
            yield Value(tuple(path), default, " ".join(comment))
        elif not isinstance(default, dict) or not default:
            raise ValueError(f"values.yaml: {'.'.join(path)} has no comment that says what it does")
        comment = []


def _at(values: dict[str, Any], path: list[str]) -> Any:
    for key in path:
        values = values[key]
    return values


def table(values: Iterator[Value]) -> str:
    """The values as a Markdown table."""
    lines = ["| value | default | meaning |", "|---|---|---|"]
    for value in values:
        default = json.dumps(value.default) if value.default != "" else '""'
        meaning = value.meaning.replace("|", "\\|")
        lines.append(f"| `{'.'.join(value.path)}` | `{default}` | {meaning} |")
    return "\n".join(lines) + "\n"


def with_table(readme: str, values: str) -> str:
    """README.md with the table between its marks. Raises ValueError when they are missing."""
    before, begin, rest = readme.partition(_BEGIN)
    _, end, after = rest.partition(_END)
    if not begin or not end:
        raise ValueError(f"README.md has no lines {_BEGIN.strip()!r} and {_END.strip()!r}")
    return f"{before}{begin}\n{table(read_values(values))}\n{end}{after}"


def main() -> None:
    """Write README.md."""
    readme = CHART / "README.md"
    try:
        text = with_table(readme.read_text(), (CHART / "values.yaml").read_text())
    except ValueError as error:
        sys.exit(str(error))
    readme.write_text(text)


if __name__ == "__main__":
    main()
