"""What the demo tells a person when it cannot go on."""

from __future__ import annotations


class DemoError(Exception):
    """One sentence: what was wrong, what was expected, where."""


class KubectlError(DemoError):
    """kubectl failed or took too long; the message holds the end of its output."""
