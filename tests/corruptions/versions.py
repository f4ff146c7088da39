"""Versions of tiny models that differ by optimizer steps, and a server that is simulated.

A model is trained on a Markov chain until its weights have the sizes of a trained model's, and then
by a policy gradient, as in RL, one step for each version. Masters are float32; what is published
and served is bf16.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

import torch
from trainsync.weights.proof.asking import ask
from trainsync.weights.proof.canaries import Prompts
from transformers import AutoConfig, AutoModelForCausalLM

from tests.vllm.support.tiny_model import make_dense, make_experts

Kind = Literal["dense", "experts"]
State = dict[str, torch.Tensor]

VOCABULARY: Final = 128
RATE: Final = 4e-4
"""The learning rate of examples/tiny_grpo: a step changes log-probabilities by about 0.01."""
_PRETRAINING: Final = 120
_BATCH: Final = 16
_LENGTH: Final = 32
HEAD: Final = "lm_head.weight"
EMBEDDING: Final = "model.embed_tokens.weight"


def make_model(kind: Kind, folder: Path) -> Path:
    """A folder of the model: dense with a tied head, or of experts."""
    spread = {"initializer_range": 0.05}
    return (
        make_dense(folder, tied=True, **spread)
        if kind == "dense"
        else make_experts(folder, **spread)
    )


def build(folder: Path, dtype: torch.dtype, *, eager: bool = False, **changes: Any) -> Any:
    """An untrained model as in ``folder``, in evaluation mode."""
    config = AutoConfig.from_pretrained(folder, **changes)
    kind = "eager" if eager else "sdpa"
    return AutoModelForCausalLM.from_config(config, attn_implementation=kind).to(dtype).eval()


class Lineage:
    """A model in training.

    Args:
        folder: of `make_model`.
        seed: of data and advantages.
    """

    def __init__(self, folder: Path, seed: int = 0, pretraining: int = _PRETRAINING) -> None:
        self._generator = torch.Generator().manual_seed(seed)
        chain = torch.Generator().manual_seed(0)
        self._chain = torch.softmax(2 * torch.randn(VOCABULARY, VOCABULARY, generator=chain), -1)
        torch.manual_seed(0)
        self.model = build(folder, torch.float32)
        first = torch.optim.AdamW(self.model.parameters(), lr=3e-3)
        for _ in range(pretraining):
            ids = self._text()
            self._update(first, self.model(ids, labels=ids).loss)
        self._optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=0.0, betas=(0.9, 0.95), weight_decay=0.0
        )
        for _ in range(10):  # the optimizer's moments
            self.step(0.0)

    def step(self, rate: float = RATE) -> None:
        """One optimizer step of a policy gradient with random advantages."""
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        ids = self._text()
        advantages = torch.randn(_BATCH, generator=self._generator)
        scores = self.model(ids).logits.log_softmax(-1)[:, :-1]
        taken = scores.gather(-1, ids[:, 1:, None])[..., 0].mean(1)
        self._update(self._optimizer, -(taken * advantages).mean())

    def state(self) -> State:
        """The version that is published now: bf16, with a head of its own also if it is tied."""
        state = {name: value.detach().bfloat16() for name, value in self.model.state_dict().items()}
        return {name: value.clone() for name, value in state.items()}

    def _update(self, optimizer: torch.optim.Optimizer, loss: torch.Tensor) -> None:
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()

    def _text(self) -> torch.Tensor:
        tokens = [torch.randint(0, VOCABULARY, (_BATCH,), generator=self._generator)]
        for _ in range(_LENGTH - 1):
            chosen = torch.multinomial(self._chain[tokens[-1]], 1, generator=self._generator)
            tokens.append(chosen[:, 0])
        return torch.stack(tokens, 1)


@dataclass
class Computer:
    """Computes log-probabilities of a state: the trainer, or the simulated server.

    The server computes in bf16 with another attention than the trainer (materialised scores, not
    torch's fused kernel) and in passes of other sizes, so that sums are rounded elsewhere.
    """

    model: Any

    @classmethod
    def trainer(cls, folder: Path, dtype: torch.dtype = torch.bfloat16) -> "Computer":
        """As the trainer computes."""
        return cls(build(folder, dtype, tie_word_embeddings=False))

    @classmethod
    def server(cls, folder: Path) -> "Computer":
        """As the simulated server does."""
        return cls(build(folder, torch.bfloat16, eager=True, tie_word_embeddings=False))

    def logprobs(
        self, state: State, canaries: Prompts, batch: int | None = None
    ) -> tuple[tuple[float, ...], ...]:
        """Of the canaries, with the weights of ``state``; in passes of ``batch`` prompts."""
        self.model.load_state_dict(state)
        if batch is None:
            return ask(self.model, canaries)
        parts: Iterator[tuple[tuple[float, ...], ...]] = (
            ask(self.model, canaries[begin : begin + batch])
            for begin in range(0, len(canaries), batch)
        )
        return tuple(row for part in parts for row in part)
