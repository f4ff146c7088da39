"""The whole page in one document: style and script are in it, nothing is fetched from elsewhere."""

import base64
import hashlib
from pathlib import Path
from typing import Final

from trainsync.api import words
from trainsync.api.page import RunPage
from trainsync.monitor.page.html import text
from trainsync.monitor.page.sections import all_sections

_HERE: Final = Path(__file__).parent
_STYLE: Final = (_HERE / "page.css").read_text(encoding="utf-8")
_SCRIPT: Final = (_HERE / "page.js").read_text(encoding="utf-8")
# Without the script the page is fetched anew now and then.
_REFRESH_SECONDS: Final = 15


def _hash(source: str) -> str:
    return "'sha256-" + base64.b64encode(hashlib.sha256(source.encode()).digest()).decode() + "'"


HEADERS: Final = {
    "Content-Security-Policy": (
        f"default-src 'none'; style-src {_hash(_STYLE)}; script-src {_hash(_SCRIPT)}; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}
"""With every answer: only this very style and script may work, and no other site may use it."""


def render(page: RunPage) -> str:
    """The document, complete without its script."""
    parts = all_sections(page)
    made = f"as of {words.clock(page.time)} UTC"
    cards = "".join(
        f'<section class="card" id="{key}">{parts[key]}</section>'
        for key in (
            "progress",
            "checkpoint",
            "timeline",
            "weights",
            "account",
            "news",
            "conditions",
        )
    )
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark">'
        f'<noscript><meta http-equiv="refresh" content="{_REFRESH_SECONDS}"></noscript>'
        f"<title>{text(page.run)} · {text(page.phase)}</title><style>{_STYLE}</style></head>"
        f'<body data-now="{page.time.timestamp():.0f}">'
        f'<header><div id="head">{parts["head"]}</div>'
        f'<p id="live" class="quiet">{made}</p></header>'
        f'<div id="notice">{parts["notice"]}</div><main>{cards}</main>'
        f"<footer>Read-only. The same facts: <code>kubectl -n {text(page.namespace)} get "
        f"trainingrun {text(page.run)} -o yaml</code>, "
        f"<code>trainsync run status {text(page.run)} -n {text(page.namespace)}</code>, "
        '<a href="metrics">metrics</a>, <a href="status.json">JSON</a>.</footer>'
        f"<script>{_SCRIPT}</script></body></html>"
    )
