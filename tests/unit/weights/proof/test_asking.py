"""A trainer's model is asked without a trace."""

from types import SimpleNamespace

import pytest
import torch
from trainsync.weights.proof.asking import Prover, ask
from trainsync.weights.proof.canaries import make_canaries
from trainsync.weights.proof.errors import ProofError
from trainsync.weights.proof.record import Tolerance

_CANARIES = make_canaries(20, count=10, length=5)
_LIMITS = Tolerance(0.1, 0.2, 0.3)


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(20, 8)
        self.drop = torch.nn.Dropout(0.5)
        self.head = torch.nn.Linear(8, 20)
        self.frozen = torch.nn.Dropout(0.5).eval()

    def forward(self, ids: torch.Tensor) -> SimpleNamespace:
        return SimpleNamespace(logits=self.head(self.frozen(self.drop(self.embed(ids)))))


def test_the_answers_are_a_softmax_in_float32_and_the_model_is_left_as_it_was() -> None:
    model = Model().bfloat16().train()
    model.frozen.eval()
    said = ask(model, (*_CANARIES, (1, 2, 3)))
    assert model.training
    assert model.drop.training
    assert not model.frozen.training
    assert all(parameter.grad is None for parameter in model.parameters())
    model.eval()
    ids = torch.tensor([_CANARIES[9]])
    scores = model(ids).logits.float().log_softmax(-1)[0, :-1]
    wanted = scores.gather(-1, ids[0, 1:, None])[:, 0]
    assert torch.allclose(torch.tensor(said[9]), wanted, atol=1e-3)
    assert [len(row) for row in said] == [4] * 10 + [2]


def test_a_function_may_be_asked_and_a_model_that_raises_keeps_its_mode() -> None:
    said = ask(lambda ids: torch.zeros(*ids.shape, 20), _CANARIES)
    assert said[0][0] == pytest.approx(-torch.tensor(20.0).log().item())
    model = Model().train()
    with pytest.raises(IndexError):
        ask(model, ((1, 99),))
    assert model.drop.training


def test_a_proof_names_the_version_and_dtype_and_a_broken_model_has_none() -> None:
    model = Model().bfloat16()
    prover = Prover(_CANARIES, _LIMITS)
    proof = prover.ask(model, 4)
    assert (proof.weight_version, proof.model_dtype) == (4, "bfloat16")
    torch.nn.init.constant_(model.head.bias, float("nan"))
    with pytest.raises(ProofError, match="log-probability nan"):
        prover.ask(model, 5)
