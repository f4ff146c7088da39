"""Every class of the catalogue is caught, by canaries and digests together, on both models."""

import itertools
import random
from pathlib import Path

import pytest
import torch
from trainsync.weights.proof.canaries import make_canaries
from trainsync.weights.proof.comparing import Proven, Refuted, compare
from trainsync.weights.proof.record import Proof
from trainsync.weights.proof.server_digests import ServerDigests, expected_digests, look
from trainsync.weights.proof.tolerance import measured_tolerance

from tests.corruptions.catalogue import CATALOGUE
from tests.corruptions.versions import VOCABULARY, Computer, Kind, Lineage, State, make_model

_CANARIES = make_canaries(VOCABULARY, avoid=(0, 1, 2))
_LARGE_STEP = 2e-3  # so that packed weights that are left behind show beyond doubt


def _digests(state: State) -> dict[str, str]:
    return expected_digests(state, state)


@pytest.mark.parametrize("kind", ["dense", "experts"])
def test_every_class_is_caught_and_a_clean_update_is_not(kind: Kind, tmp_path: Path) -> None:
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
        seen, _ = look(_digests(old), _digests(old), ServerDigests())
        rng = random.Random(0)
        for corruption, _ in itertools.product(CATALOGUE, range(2)):
            served = corruption.fault(rng, old, new)
            answers = server.logprobs(served, _CANARIES, 4)
            verdict = compare(proof, answers, before=before, said_before=said[3])
            caught = isinstance(verdict, Refuted)
            if corruption.digests_see:
                torn = look(_digests(served), _digests(new), seen)[1] is not None
                assert torn, corruption.name
                caught = caught or torn
            assert caught, corruption.name
    finally:
        torch.set_num_threads(threads)
