"""The e2e tests' operator, on a cluster whose node has vLLM's environment."""

from tests.e2e.conftest import platform

__all__ = ["platform"]
