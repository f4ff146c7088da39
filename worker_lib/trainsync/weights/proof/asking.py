"""Ask a trainer's model for its log-probabilities of the canaries."""

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

import torch

from trainsync.dist.sharded import is_fsdp2
from trainsync.weights.proof.canaries import Prompts
from trainsync.weights.proof.record import Proof, Tolerance, make_proof

_BATCH: Final = 8  # prompts of one forward pass

Model = Callable[[torch.Tensor], Any]
"""From token ids ``int64[batch, tokens]`` to logits ``[batch, tokens, vocabulary]``, or to an
object that has them as ``logits``, as models of transformers do."""


class Prover:
    """The trainer's side: a `Proof` for each version.

    Args:
        canaries: of `make_canaries`, or `check_canaries` of your own. The same for each version.
        tolerance: of the servers; see `trainsync.weights.proof.tolerance`.
    """

    def __init__(self, canaries: Prompts, tolerance: Tolerance) -> None:
        self._canaries = canaries
        self._tolerance = tolerance

    def ask(self, model: Model, version: int) -> Proof:
        """The proof of the weights that ``model`` has now.

        With a sharded model (FSDP) this is a forward pass and so a collective: all ranks call it,
        and get the same.

        Args:
            model: must compute as servers do, so with a LoRA adapter that servers get merged. A
                module is asked without dropout and gradients, and left in its mode.
            version: the global step.

        Raises:
            ProofError: the model gives numbers that are no log-probabilities.
        """
        logprobs = ask(model, self._canaries)
        dtype = str(_dtype(model)).removeprefix("torch.")
        return make_proof(version, dtype, self._canaries, logprobs, self._tolerance)


@torch.no_grad()
def ask(model: Model, canaries: Prompts) -> tuple[tuple[float, ...], ...]:
    """Log-probabilities as in `Proof`, by a softmax in float32.

    Prompts of one length share passes of 8 prompts at most; nothing is padded. Beside the logits of
    a pass, those of one prompt are held in float32.
    """
    lengths: dict[int, list[int]] = defaultdict(list)
    for number, prompt in enumerate(canaries):
        lengths[len(prompt)].append(number)
    device = _device(model)
    found: dict[int, tuple[float, ...]] = {}
    with _evaluating(model):
        for numbers in lengths.values():
            for begin in range(0, len(numbers), _BATCH):
                batch = numbers[begin : begin + _BATCH]
                ids = torch.tensor([canaries[number] for number in batch], device=device)
                output = model(ids)
                logits = output if isinstance(output, torch.Tensor) else output.logits
                for row, number in enumerate(batch):
                    scores = logits[row, :-1].float().log_softmax(-1)
                    taken = scores.gather(-1, ids[row, 1:, None])[:, 0]
                    # Rounding may leave a certain token a hair above 0; NaN stays.
                    found[number] = tuple(taken.clamp(max=0.0).tolist())
    return tuple(found[number] for number in range(len(canaries)))


@contextmanager
def _evaluating(model: Model) -> Iterator[None]:
    """Evaluation mode in the block; after it each submodule has its mode and shards again."""
    if not isinstance(model, torch.nn.Module):
        yield
        return
    modes = [(module, module.training) for module in model.modules()]
    try:
        model.eval()
        yield
    finally:
        for module, training in modes:
            module.training = training
            if is_fsdp2(module):
                module.reshard()  # the outermost one would wait for a backward pass with it


def _device(model: Model) -> torch.device:
    if isinstance(model, torch.nn.Module):
        for parameter in model.parameters():
            return parameter.device
    return torch.get_default_device()


def _dtype(model: Model) -> torch.dtype | str:
    if isinstance(model, torch.nn.Module):
        for parameter in model.parameters():
            if parameter.is_floating_point():
                return parameter.dtype
    return "unknown"
