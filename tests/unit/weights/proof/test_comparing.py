"""Servers with the right weights are proven; others are refuted, with the reason."""

import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from trainsync.weights.proof.comparing import Proven, Refuted, compare
from trainsync.weights.proof.errors import ProofError
from trainsync.weights.proof.record import Proof, Tolerance
from trainsync.weights.proof.tolerance import measured_tolerance

_CANARIES = tuple(tuple(range(33)) for _ in range(32))
_LIMITS = Tolerance(0.01, 0.02, 0.1)
Rows = tuple[tuple[float, ...], ...]


def _near(rows: Rows, size: float, seed: int) -> Rows:
    rng = random.Random(seed)
    return tuple(tuple(min(v + rng.gauss(0, size), 0.0) for v in row) for row in rows)


def _proof(seed: int = 0) -> Proof:
    rng = random.Random(seed)
    rows = tuple(tuple(-rng.uniform(1, 9) for _ in range(32)) for _ in _CANARIES)
    return Proof(2, "float32", _CANARIES, rows, _LIMITS)


@given(seed=st.integers(0, 1 << 30), noise=st.floats(0, 0.008))
def test_noise_below_the_tolerance_is_proven(seed: int, noise: float) -> None:
    proof = _proof(seed)
    before = replace(proof, weight_version=1, logprobs=_near(proof.logprobs, 0.01, seed + 1))
    verdict = compare(
        proof,
        _near(proof.logprobs, noise, seed + 2),
        before=before,
        said_before=_near(before.logprobs, noise, seed + 3),
    )
    assert isinstance(verdict, Proven)
    assert verdict.rms <= 0.02


@given(seed=st.integers(0, 1 << 30), share=st.floats(-0.2, 0.6))
def test_a_server_that_went_only_part_of_the_step_is_refuted(seed: int, share: float) -> None:
    proof = _proof(seed)
    rng = random.Random(seed)
    step = tuple(tuple(rng.gauss(0, 0.008) for _ in range(32)) for _ in _CANARIES)
    earlier = tuple(
        tuple(v + d for v, d in zip(row, moves, strict=True))
        for row, moves in zip(proof.logprobs, step, strict=True)
    )
    part = tuple(
        tuple(v + (1 - share) * d for v, d in zip(row, moves, strict=True))
        for row, moves in zip(proof.logprobs, step, strict=True)
    )
    before = replace(proof, weight_version=1, logprobs=earlier)
    verdict = compare(proof, _near(part, 0.003, seed + 2), before=before)
    assert isinstance(verdict, Refuted)


@given(canary=st.integers(0, 31), token=st.integers(0, 31), off=st.floats(0.101, 100))
def test_one_token_too_far_off_is_refuted_and_named(canary: int, token: int, off: float) -> None:
    proof = _proof()
    rows = [list(row) for row in proof.logprobs]
    rows[canary][token] -= off
    verdict = compare(proof, rows)
    assert isinstance(verdict, Refuted)
    assert verdict.canary == canary
    assert verdict.off == pytest.approx(off)


def test_the_answers_of_the_version_before_are_stale_however_small_the_step() -> None:
    proof = _proof()
    before = replace(proof, weight_version=1, logprobs=_near(proof.logprobs, 0.0005, 1))
    said = _near(before.logprobs, 0.005, 2)
    assert isinstance(compare(proof, said, before=before), Proven)
    verdict = compare(proof, said, before=before, said_before=said)
    assert isinstance(verdict, Refuted)
    assert "exactly as with version 1" in verdict.reason


def test_a_model_that_did_not_move_makes_no_server_stale() -> None:
    proof = _proof()
    said = _near(proof.logprobs, 0.005, 2)
    before = replace(proof, weight_version=1)
    assert isinstance(compare(proof, said, before=before, said_before=said), Proven)


def test_other_canaries_before_are_not_compared_with() -> None:
    proof = _proof()
    other = replace(_proof(5), canaries=tuple(tuple(range(1, 34)) for _ in range(32)))
    assert isinstance(compare(proof, proof.logprobs, before=other), Proven)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_answers_that_are_no_numbers_are_refuted(value: float) -> None:
    proof = _proof()
    rows = [list(row) for row in proof.logprobs]
    rows[3][4] = value
    assert compare(proof, rows) == Refuted("the server's log-probabilities are no numbers", 3)


def test_answers_for_other_tokens_are_refuted() -> None:
    proof = _proof()
    assert isinstance(compare(proof, proof.logprobs[:-1]), Refuted)


def test_a_tolerance_is_measured_on_two_versions_or_more() -> None:
    proof = _proof()
    trainer = [proof.logprobs, _proof(1).logprobs]
    server = [_near(rows, 0.01, 4) for rows in trainer]
    limits = measured_tolerance(trainer, server)
    assert 0.008 < limits.typical < 0.013
    assert 0.018 < limits.rms < 0.023
    assert limits.trainer_rms == 0
    with pytest.raises(ProofError):
        measured_tolerance(trainer[:1], server[:1])
