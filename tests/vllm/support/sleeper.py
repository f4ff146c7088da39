"""A part of vLLM's workers that can lose their weights, as a GPU's do at sleep level 2.

vLLM on a CPU keeps them through each sleep. For ``--worker-extension-cls``.
"""

from typing import Any


class Extension:
    """Mixed into the class of workers."""

    model_runner: Any

    def lose_weights(self) -> None:
        """Overwrite them all."""
        for parameter in self.model_runner.model.parameters():
            parameter.data.zero_()
