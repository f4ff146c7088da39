"""The error that devcluster shows to users."""

from __future__ import annotations


class DevclusterError(Exception):
    """One sentence with the problem, the place and the remedy."""
