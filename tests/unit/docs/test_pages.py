"""Links lead somewhere, blocks say their language, and the site shows what GitHub shows."""

import re

import pytest
import yaml

from tests.unit.docs.pages import ROOT, all_blocks, blocks, pages, prose

_LINK = re.compile(r"\]\((?!https?:|mailto:)([^)\s]+)\)")
_LANGUAGES = {"bash", "console", "json", "python", "text", "yaml", "promql"}
_DIRECTIVES = re.compile(r'file \S+|run( fails)?( shows ".+")?|values|cluster')


def _anchors(text: str) -> set[str]:
    """The ids of headings, as GitHub and Python-Markdown agree to make them."""
    found = set()
    for heading in re.findall(r"^#+ (.+)$", text, re.MULTILINE):
        plain = re.sub(r"[^\w\s-]", "", re.sub(r"[`*]", "", heading)).strip().lower()
        found.add(re.sub(r"[\s-]+", "-", plain))
    return found


@pytest.mark.parametrize("page", pages(), ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_leads_to_a_file_and_heading_that_exist(page):
    for link in _LINK.findall(prose(page)):
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), f"{link}: there is no such file"
        assert target.is_relative_to(ROOT), f"{link}: outside of the repository"
        if anchor and target.suffix == ".md":
            assert anchor in _anchors(prose(target)), f"{link}: there is no such heading"


@pytest.mark.parametrize("page", pages(), ids=lambda page: str(page.relative_to(ROOT)))
def test_prose_is_wrapped_at_120_characters(page):
    lines = enumerate(prose(page).splitlines(), 1)
    # A row of a table, a picture and a comment cannot be wrapped.
    long = [n for n, line in lines if len(line) > 120 and not line.startswith(("|", "![", "<"))]
    assert not long, f"{page.name}: lines {long}"


@pytest.mark.parametrize("page", pages(), ids=lambda page: str(page.relative_to(ROOT)))
def test_every_block_is_fenced_and_says_its_language(page):
    for block in blocks(page):
        assert block.language in _LANGUAGES, block.where
        assert not block.directive or _DIRECTIVES.fullmatch(block.directive), block.where
    lines = prose(page).splitlines()
    for number, (before, line) in enumerate(zip(["", *lines], lines, strict=False), 1):
        if line.startswith("    ") and not before.strip():
            above = next((text for text in reversed(lines[: number - 1]) if text.strip()), "")
            listed = re.match(r"\s*([-*]|\d+\.) |    ", above)
            assert listed, f"{page.name}:{number}: an indented block escapes the tests: fence it"


def test_the_site_shows_every_page_once():
    site = yaml.safe_load((ROOT / "mkdocs.yml").read_text())
    shown = _leaves(site["nav"])
    there = [str(page.relative_to(ROOT / "docs")) for page in ROOT.glob("docs/**/*.md")]
    assert sorted(shown) == sorted(there)


def _leaves(node: object) -> list[str]:
    if isinstance(node, str):
        return [node]
    items = node.values() if isinstance(node, dict) else node
    assert not isinstance(items, (int, float)) and items is not None
    return [leaf for item in items for leaf in _leaves(item)]  # type: ignore[attr-defined]


def test_blocks_are_found_with_their_directives(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("# A\n\n<!-- test: run -->\n```bash\nls\n```\n\n```text\nx\n```\n")
    found = [(block.line, block.language, block.text, block.directive) for block in blocks(page)]
    assert found == [(4, "bash", "ls\n", "run"), (8, "text", "x\n", "")]


def test_a_block_that_is_not_closed_is_an_error(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("```bash\nls\n")
    with pytest.raises(ValueError, match="not closed"):
        blocks(page)


def test_there_is_something_to_read():
    assert len(pages()) > 25
    assert len(all_blocks("bash", "console", "python", "yaml")) > 30
