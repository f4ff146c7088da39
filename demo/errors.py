"""Errors that end the demo."""

from __future__ import annotations


class DemoError(Exception):
    """One sentence with the error, the expectation and the place."""


class KubectlError(DemoError):
    """kubectl failed or took too long; the message holds the end of its output."""
