"""Canaries alone catch every class of the catalogue that changes enough, on both models."""

import itertools
import random
from pathlib import Path

import pytest
import torch
from trainsync.weights.proof.canaries import make_canaries
from trainsync.weights.proof.comparing import Proven, Refuted, compare
from trainsync.weights.proof.record import Proof
from trainsync.weights.proof.tolerance import measured_tolerance

from tests.corruptions.catalogue import CATALOGUE
from tests.corruptions.versions import VOCABULARY, Computer, Kind, Lineage, make_model

_CANARIES = make_canaries(VOCABULARY, avoid=(0, 1, 2))
_LARGE_STEP = 2e-3  # so that packed weights that are left behind show beyond doubt
_TOO_SMALL = {"a lost bucket, with old bytes", "a wrong scale"}  # for canaries: tests/vllm has them


@pytest.mark.parametrize("kind", ["dense", "experts"])
def test_canaries_catch_every_class_and_no_clean_update(kind: Kind, tmp_path: Path) -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        folder = make_model(kind, tmp_path)
        lineage = Lineage(folder, pretraining=60)
        trainer, server = Computer.trainer(folder, torch.float32), Computer.server(folder)
        states, records, said = [], [], []
        for number in range(5):
            lineage.step(_LARGE_STEP)
            states.append(lineage.state())
            records.append(trainer.logprobs(states[-1], _CANARIES))
            said.append(server.logprobs(states[-1], _CANARIES, number + 3))
        limits = measured_tolerance(records[:3], said[:3])
        before, proof = (
            Proof(number, "float32", _CANARIES, records[number], limits) for number in (3, 4)
        )
        old, new = states[3:]
        clean = compare(proof, said[4], before=before, said_before=said[3])
        assert isinstance(clean, Proven)
        rng = random.Random(0)
        for corruption, _ in itertools.product(CATALOGUE, range(2)):
            served = corruption.fault(rng, old, new)
            answers = server.logprobs(served, _CANARIES, 4)
            verdict = compare(proof, answers, before=before, said_before=said[3])
            if corruption.name not in _TOO_SMALL:
                assert isinstance(verdict, Refuted), corruption.name
    finally:
        torch.set_num_threads(threads)
