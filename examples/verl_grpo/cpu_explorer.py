"""An explorer without an inference engine: transformers on a CPU, as a Ray actor."""

from dataclasses import dataclass

from trainsync import ModuleEngine, RunContext

from verl_grpo.tiny_qwen2 import Rollouts, build_model, digest, sample


@dataclass(frozen=True)
class Answers:
    """A batch, and the weights that wrote it.

    Attributes:
        digest: digest of the explorer's weights, computed after the update.
    """

    explorer: int
    version: int
    digest: str
    rollouts: Rollouts


class Explorer:
    """Takes each new version and writes answers at its turn."""

    def __init__(self, ctx: RunContext, index: int) -> None:
        self._index = index
        self._model = build_model()
        self._engine = ModuleEngine(self._model)
        self._client = ctx.explorer(f"explorer-{index}")
        self._pace = ctx.pace_explorer(self._client, self._update)
        self._digest = ""

    def ready(self) -> None:
        """Returns when the explorer has joined the run."""

    def run(self) -> tuple[int, str]:
        """Write until training ends; returns the last version and the digest of its weights."""
        for turn in self._pace:
            rollouts = sample(self._model, seed=1000 * turn.number + self._index)
            answers = Answers(self._index, self._engine.version, self._digest, rollouts)
            self._pace.deliver(turn, answers)
        return self._engine.version, self._digest

    def _update(self, version: int) -> int | None:
        newer = self._client.update(self._engine, version)
        self._digest = digest(self._model.state_dict())
        return newer
