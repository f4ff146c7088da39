"""Small pieces of HTML, each escaped. Pure."""

import html
from datetime import datetime

from trainsync.api import words
from trainsync.api.base import format_time


def text(value: object) -> str:
    """A string from anywhere, harmless between tags and in quoted attributes."""
    return html.escape(words.clean(str(value)))


def name(value: object) -> str:
    """A name that a person gave: it cannot change how what stands around it is read."""
    return f"<bdi>{text(value)}</bdi>"


def link(label: str, url: str) -> str:
    """A link to a page elsewhere, which learns nothing of this one; text if it is no web page."""
    if not url.startswith(("https://", "http://")):
        return f"{name(label)} {text(url)}"
    return f'<a href="{text(url)}" rel="noopener noreferrer" target="_blank">{name(label)}</a>'


def ago(then: datetime, now: datetime) -> str:
    """The time since ``then``, which the page's script keeps up to date."""
    exact = f"{words.clock(then)} UTC"
    return (
        f'<time datetime="{format_time(then)}" title="{exact}" data-age>'
        f"{words.ago(then, now)}</time>"
    )


def ahead(then: datetime, now: datetime) -> str:
    """The time until ``then``, for people."""
    left = words.duration(max(int((then - now).total_seconds()), 0))
    return f'<time datetime="{format_time(then)}" title="{words.clock(then)} UTC">{left}</time>'


def exact(then: datetime) -> str:
    """The clock's time."""
    return f'<time datetime="{format_time(then)}">{words.clock(then)}</time>'


def pill(word: str, kind: str) -> str:
    """A word in a coloured field; ``kind`` is a class of the style sheet: good, bad, warn, calm."""
    return f'<span class="pill {kind}">{text(word)}</span>'


def bar(fraction: float, label: str) -> str:
    """A bar that is full at 1. Its width is an attribute: no inline style is allowed."""
    percent = min(max(fraction, 0.0), 1.0) * 100
    return (
        f'<svg class="bar" role="img" aria-label="{text(label)}" height="10" width="100%">'
        '<rect class="track" width="100%" height="10" rx="5"/>'
        f'<rect class="fill" width="{percent:.1f}%" height="10" rx="5"/></svg>'
    )


def fact(label: str, value: str) -> str:
    """A row of a list of facts; ``value`` is HTML."""
    return f"<div><dt>{text(label)}</dt><dd>{value}</dd></div>"


def facts(rows: list[tuple[str, str]]) -> str:
    """A list of facts; the second of each is HTML."""
    return "<dl>" + "".join(fact(label, value) for label, value in rows) + "</dl>"


def table(heads: list[str], rows: list[list[str]], *, numbers: frozenset[int]) -> str:
    """A table; cells are HTML. ``numbers`` are the columns set flush right."""

    def row(cells: list[str], tag: str) -> str:
        scope = ' scope="col"' if tag == "th" else ""
        made = "".join(
            f"<{tag}{scope}{' class=n' if i in numbers else ''}>{value}</{tag}>"
            for i, value in enumerate(cells)
        )
        return f"<tr>{made}</tr>"

    body = "".join(row(cells, "td") for cells in rows)
    return f"<table><thead>{row(heads, 'th')}</thead><tbody>{body}</tbody></table>"
