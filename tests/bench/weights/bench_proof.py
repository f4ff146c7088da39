"""What a proof catches, and how often it is wrong, on tiny models of the catalogue of corruptions.

Simulated: the server is the same model in transformers, in bf16, with another attention and passes
of other sizes than the trainer, so that sums are rounded elsewhere; tests/vllm/test_proof.py shows
that a real vLLM on a CPU is as far off. Versions are optimizer steps of a policy gradient at the
rate of examples/tiny_grpo. Odd trials have a trainer that computes in float32, even ones in bf16.
Layers are those of a real vLLM on the CPU that has loaded the corrupted weights. The details say
what each catches alone, by class, and how small a step canaries still see. Needs ``make vllm-env``
and its folder as ``VLLM_ENV``.
"""

import random
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch
from trainsync.weights.proof.canaries import make_canaries
from trainsync.weights.proof.comparing import Logprobs, Refuted, compare
from trainsync.weights.proof.record import Proof, Tolerance
from trainsync.weights.proof.tolerance import measured_tolerance

from tests.bench.harness import Figure
from tests.corruptions.catalogue import CATALOGUE, Corruption
from tests.corruptions.real_layers import RealLayers
from tests.corruptions.versions import (
    RATE,
    VOCABULARY,
    Computer,
    Kind,
    Lineage,
    State,
    make_model,
)
from tests.vllm.support.server import environment, vllm_environment

CORRUPTIONS: Final = 2_000
CLEAN: Final = 10_000
RATES: Final = (1e-6, 1e-5, 3e-5, 1e-4, RATE)
_VERSIONS: Final = 8  # that corruptions are made of
_CALIBRATION: Final = 30  # versions that the tolerance is measured on, and no trial uses
_CURVE: Final = 20  # trials of a rate
_STEP_TOKENS: Final = 65_536  # 512 answers of 128 tokens
_CANARIES: Final = make_canaries(VOCABULARY, avoid=(0, 1, 2))


@dataclass
class Setting:
    """A model with its trainer, in one dtype, and its simulated server."""

    lineage: Lineage
    trainer: Computer
    exact: Computer
    server: Computer
    layers: RealLayers
    limits: Tolerance
    rng: random.Random

    def said(self, state: State) -> Logprobs:
        """By the server, in passes of a random size."""
        return self.server.logprobs(state, _CANARIES, self.rng.choice([1, 2, 3, 5, 8, 16]))

    def version(self, number: int, rate: float) -> tuple[State, Proof]:
        """The next one of the lineage."""
        self.lineage.step(rate)
        state = self.lineage.state()
        said = self.trainer.logprobs(state, _CANARIES)
        return state, Proof(number, "tiny", _CANARIES, said, self.limits)


def setting(model: Path, dtype: torch.dtype, layers: RealLayers) -> Setting:
    """With a tolerance that is measured on versions of its own."""
    trainer, exact = Computer.trainer(model, dtype), Computer.trainer(model, torch.float32)
    server, limits = Computer.server(model), Tolerance(1, 1, 1)
    made = Setting(Lineage(model), trainer, exact, server, layers, limits, random.Random(0))
    rows: list[tuple[Logprobs, Logprobs, Logprobs]] = []
    for number in range(_CALIBRATION):
        state, proof = made.version(number, RATE)
        rows.append((proof.logprobs, made.said(state), exact.logprobs(state, _CANARIES)))
    mine, servers, exacts = zip(*rows, strict=True)
    made.limits = measured_tolerance(mine, servers, None if dtype is torch.float32 else exacts)
    return made


def _trials(
    place: Setting, corruptions: Iterator[Corruption], rate: float
) -> Iterator[tuple[Corruption, bool, bool]]:
    """(class, whether the canaries catch it, whether the layers do) for each corruption."""
    versions = [place.version(number, rate) for number in range(_VERSIONS)]
    said = [place.said(state) for state, _ in versions]
    for corruption in corruptions:
        new = place.rng.randrange(1, _VERSIONS)
        (old_state, before), (state, proof) = versions[new - 1], versions[new]
        served = corruption.fault(place.rng, old_state, state)
        verdict = compare(proof, place.said(served), before=before, said_before=said[new - 1])
        torn = bool(place.layers.wrong(served, served if corruption.staged else state))
        yield corruption, isinstance(verdict, Refuted), torn


def _caught(places: list[Setting], count: int) -> Figure:
    totals: Counter[str] = Counter()
    by_canary: Counter[str] = Counter()
    by_layers: Counter[str] = Counter()
    caught: Counter[str] = Counter()
    for number, place in enumerate(places):
        turns = iter([CATALOGUE[n % len(CATALOGUE)] for n in range(number, count, len(places))])
        for corruption, canary, torn in _trials(place, turns, RATE):
            totals[corruption.name] += 1
            by_canary[corruption.name] += canary
            by_layers[corruption.name] += torn
            caught[corruption.name] += canary or torn
    details = {"corruptions": float(count), "learning_rate": RATE}
    for name, total in totals.items():
        details[f"{name}: canaries"] = by_canary[name] / total
        details[f"{name}: layers"] = by_layers[name] / total
        details[f"{name}: both"] = caught[name] / total
    for rate in RATES:
        for part in (c for c in CATALOGUE if c.name in ("stale weights", "mixed versions")):
            seen = [
                (canary, torn)
                for place in places
                for _, canary, torn in _trials(place, iter([part] * (_CURVE // len(places))), rate)
            ]
            for number, name in enumerate(("canaries", "layers")):
                share = sum(pair[number] for pair in seen) / len(seen)
                details[f"{part.name} at {rate:g}: {name}"] = share
    return Figure(
        "proof_caught",
        sum(caught.values()) / count,
        "of the corruptions",
        ">= 0.999",
        f"{count} corruptions of {len(CATALOGUE)} classes; canaries and layers",
        details,
    )


def _false_alarms(places: list[Setting], count: int) -> Figure:
    alarms, told = 0, 0
    for place in places:
        state, before = place.version(0, RATE)
        said_before = place.said(state)
        for number in range(1, count // len(places) + 1):
            state, proof = place.version(number, place.rng.choice(RATES))
            said = place.said(state)
            verdict = compare(proof, said, before=before, said_before=said_before)
            wrong = place.layers.wrong(state, state)
            if isinstance(verdict, Refuted) or wrong:
                alarms += 1
                print(f"false alarm: {verdict}, {wrong}", flush=True)
            else:
                told += verdict.share is not None
            before, said_before = proof, said
    return Figure(
        "proof_false_alarms",
        alarms / count,
        "of the clean updates",
        "<= 0.0001",
        f"{count} updates with the right weights: a simulated server, and a real one's layers",
        {"updates": float(count), "alarms": float(alarms), "share_told": told / count},
    )


def _seconds_of_step(place: Setting) -> Figure:
    """Beside the training step's forward and backward pass alone: generation is left out."""
    model = place.lineage.model
    rows = [[1 + n % (VOCABULARY - 1) for n in range(128)]] * 64
    ids = torch.tensor(rows)
    started = time.perf_counter()
    scores = model(ids).logits.log_softmax(-1)
    scores.gather(-1, ids[..., None]).mean().backward()
    step = (time.perf_counter() - started) * _STEP_TOKENS / ids.numel()
    model.zero_grad()
    place.trainer.logprobs(place.lineage.state(), _CANARIES)
    started = time.perf_counter()
    place.trainer.logprobs(place.lineage.state(), _CANARIES)
    seconds = time.perf_counter() - started
    return Figure(
        "proof_seconds_of_step",
        seconds / step,
        "of the step's seconds",
        "<= 0.01",
        f"forward and backward of {_STEP_TOKENS} tokens, without generation",
        {"proof_seconds": seconds, "step_seconds": step},
    )


def run() -> list[Figure]:
    """`proof_caught`, `proof_false_alarms` and `proof_seconds_of_step`."""
    torch.set_num_threads(1)
    with ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        kinds: tuple[Kind, ...] = ("dense", "experts")
        python, places = vllm_environment() / "bin" / "python", []
        (scratch / "plugin").mkdir()
        variables = environment(scratch / "plugin")
        for kind in kinds:
            model = make_model(kind, scratch / kind)
            layers = RealLayers(python, variables, model)
            stack.callback(layers.close)
            places += [setting(model, dtype, layers) for dtype in (torch.bfloat16, torch.float32)]
        return [
            _seconds_of_step(places[1]),
            _caught(places, CORRUPTIONS),
            _false_alarms(places, CLEAN),
        ]
