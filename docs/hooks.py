"""Hooks of mkdocs: the site shows the pages as they are shown in the repository.

Lists and tables may follow a paragraph without an empty line there; Python-Markdown wants one. And
files of the repository that a page links to become pages of the site:
the pages are written for the repository, where ``../examples/tiny_grpo/driver.py`` is the file. The
site has no address of a repository to point to, so it carries those files itself, under
``repository/``: Markdown as a page, anything else as one block of code. A link to a file that does
not exist stays as it is, and mkdocs refuses it.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import TYPE_CHECKING

from mkdocs.structure.files import File

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

_ROOT = Path(__file__).parent.parent
_CARRIED = "repository/"
_LINK = re.compile(r"(?<=\]\()(?!https?:|#|mailto:)([^)#\s]+)")
_ITEM = re.compile(r"(?:[-*]|\d+\.) |\|")
_NO_PARAGRAPH = re.compile(r"\s|[-*] |\d+\. |\||#|$")
_LANGUAGES = {".py": "python", ".yaml": "yaml", ".yml": "yaml", ".toml": "toml", ".json": "json"}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the files that pages link to, and those that they link to in turn."""
    waiting = [file.src_uri for file in files.documentation_pages()]
    while waiting:
        uri = waiting.pop()
        for target in _LINK.findall(_text_of(uri)):
            carried = _uri_of(_resolve(uri, target))
            if carried is None or files.get_file_from_path(carried):
                continue
            files.append(File.generated(config, carried, content=_content(carried)))
            waiting.append(carried)
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Set lists apart, and turn links to files of the repository into links to their pages."""
    uri = page.file.src_uri

    def replace(match: re.Match[str]) -> str:
        carried = _uri_of(_resolve(uri, match[1]))
        return posixpath.relpath(carried, posixpath.dirname(uri) or ".") if carried else match[1]

    return _LINK.sub(replace, _apart(markdown))


def _apart(markdown: str) -> str:
    """The text with an empty line between a paragraph and the list or table after it."""
    lines: list[str] = []
    fenced = False
    for line in markdown.splitlines():
        fenced = fenced != line.lstrip().startswith("```")
        paragraph = bool(lines) and not _NO_PARAGRAPH.match(lines[-1])
        if not fenced and paragraph and _ITEM.match(line):
            lines.append("")
        lines.append(line)
    return "\n".join(lines)


def _resolve(uri: str, target: str) -> str:
    """The path in the repository that ``target`` means on the page ``uri``."""
    return posixpath.normpath(posixpath.join(posixpath.dirname(_path_of(uri)), target))


def _path_of(uri: str) -> str:
    """Where the page's text lies in the repository."""
    if not uri.startswith(_CARRIED):
        return f"docs/{uri}"
    path = uri.removeprefix(_CARRIED)
    return path if (_ROOT / path).exists() else path.removesuffix(".md")


def _uri_of(path: str) -> str | None:
    """The page that a file of the repository becomes; None if it is no such file."""
    if path.startswith("docs/"):
        # Linked from outside of docs/: the page has another place there than on the site.
        return path.removeprefix("docs/") if (_ROOT / path).is_file() else None
    if path.startswith("..") or not (_ROOT / path).is_file():
        return None
    return _CARRIED + (path if path.endswith(".md") else f"{path}.md")


def _text_of(uri: str) -> str:
    path = _path_of(uri)
    return (_ROOT / path).read_text() if path.endswith(".md") else ""


def _content(uri: str) -> str:
    path = _path_of(uri)
    text = (_ROOT / path).read_text()
    if path.endswith(".md"):
        return text
    return f"# {path}\n\n````{_LANGUAGES.get(Path(path).suffix, 'text')}\n{text}\n````\n"
