"""The one error that devcluster shows to a person."""

from __future__ import annotations


class DevclusterError(Exception):
    """Something a person must know: one sentence that says what, where and what to do."""
