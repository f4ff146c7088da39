"""The e2e tests' operator and runs, on a cluster with Kueue."""

from tests.e2e.conftest import platform

__all__ = ["platform"]
