"""How often the proof of a real vLLM server is wrong, when the server has the right weights.

A ``vllm serve`` on the CPU of a dense model with a tied head, then one of a model of experts, takes
version after version: optimizer steps as in `bench_proof`, of a learning rate that is drawn anew
for each. In each update vLLM's workers compare their layers with what was staged; then the server
answers the canaries, which are compared with the trainer's, as an agent does. An update that is
refused counts as an alarm, too. The tolerance is measured on versions of its own. Half of the
updates have a trainer that computes in bf16, half one in float32. Needs ``make vllm-env`` and its
folder as ``VLLM_ENV``.
"""

import os
import random
import statistics
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Final

import torch
from trainsync.engines.servers.errors import ServerError
from trainsync.engines.servers.proving import ServerProver
from trainsync.engines.servers.vllm import VLLMServer
from trainsync.weights.proof.canaries import make_canaries
from trainsync.weights.proof.comparing import Logprobs, Refuted
from trainsync.weights.proof.record import Proof
from trainsync.weights.proof.tolerance import measured_tolerance
from trainsync.weights.staging.area import StagingArea

from tests.bench.harness import Figure, spread
from tests.bench.weights.bench_proof import RATES
from tests.corruptions.real_layers import for_checkpoint
from tests.corruptions.versions import (
    RATE,
    VOCABULARY,
    Computer,
    Kind,
    Lineage,
    State,
    make_model,
)
from tests.vllm.support.server import CALL_SECONDS, serve

UPDATES: Final = int(os.environ.get("TRAINSYNC_BENCH_UPDATES", "320"))
_CALIBRATION: Final = 30
_CANARIES: Final = make_canaries(VOCABULARY, avoid=(0, 1, 2))


class _Followed:
    """A server that takes the versions of a lineage, one after the other."""

    def __init__(self, driver: VLLMServer, area: StagingArea, folder: Path) -> None:
        self.alarms: list[str] = []
        self.seconds: list[float] = []
        self._driver, self._area, self._folder = driver, area, folder
        self._lineage = Lineage(folder)
        self._exact = Computer.trainer(folder, torch.float32)
        self._rng = random.Random(0)
        self._version = 0

    def follow(self, dtype: torch.dtype, updates: int) -> None:
        """Prove that many versions of a trainer that computes in ``dtype``."""
        trainer = Computer.trainer(self._folder, dtype)
        mine: list[Logprobs] = []
        servers: list[Logprobs] = []
        exact: list[Logprobs] = []
        for _ in range(_CALIBRATION):
            state = self._next(RATE)
            self._update(state)
            mine.append(trainer.logprobs(state, _CANARIES))
            servers.append(self._driver.logprobs(_CANARIES))
            exact.append(self._exact.logprobs(state, _CANARIES))
        limits = measured_tolerance(mine, servers, None if dtype is torch.float32 else exact)
        prover = ServerProver(
            self._driver, Proof(self._version, "tiny", _CANARIES, mine[-1], limits)
        )
        for _ in range(updates):
            state = self._next(self._rng.choice(RATES))
            said = trainer.logprobs(state, _CANARIES)
            proof = Proof(self._version, "tiny", _CANARIES, said, limits)
            started = time.monotonic()
            try:
                self._update(state)
                verdict = prover.prove(proof)
            except ServerError as error:
                self._alarm(str(error))
                continue
            self.seconds.append(time.monotonic() - started)
            if isinstance(verdict, Refuted):
                self._alarm(verdict.reason)

    def _next(self, rate: float) -> State:
        self._lineage.step(rate)
        self._version += 1
        return self._lineage.state()

    def _update(self, state: State) -> None:
        self._driver.update(self._version, self._area.stage(self._version, for_checkpoint(state)))

    def _alarm(self, reason: str) -> None:
        self.alarms.append(reason)
        print(f"false alarm, version {self._version}: {reason}", flush=True)


def run() -> list[Figure]:
    """`proof_false_alarms_real`."""
    torch.set_num_threads(1)
    kinds: tuple[Kind, ...] = ("dense", "experts")
    dtypes = (torch.bfloat16, torch.float32)
    alarms, times = 0, []
    with tempfile.TemporaryDirectory() as name:
        for kind in kinds:
            place = Path(name) / kind
            place.mkdir()
            with ExitStack() as stack:
                folder = make_model(kind, place / "model")
                server = serve(folder, place)
                stack.callback(server.stop)
                driver = stack.enter_context(VLLMServer(server.url, timeout=CALL_SECONDS))
                area = StagingArea()
                stack.callback(area.close)
                followed = _Followed(driver, area, folder)
                for dtype in dtypes:
                    followed.follow(dtype, UPDATES // (len(kinds) * len(dtypes)))
            alarms += len(followed.alarms)
            times += followed.seconds
    return [
        Figure(
            "proof_false_alarms_real",
            alarms / UPDATES,
            "of the clean updates",
            "<= 0.0001",
            f"{UPDATES} updates of a real vLLM with the right weights",
            {
                "updates": float(UPDATES),
                "alarms": float(alarms),
                "proven_seconds_total": statistics.fsum(times),
            }
            | spread("update_and_proof_seconds", times),
        )
    ]
