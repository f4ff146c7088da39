"""New weights into a real ``vllm serve`` on the CPU, 0.5 GB: how long nothing is generated.

Ours is a version that lies staged in shared memory and was prepared while the server served, from
the call to pause to the answer to resume, as `VLLMServer` measures it. In the details:
``whole_update`` also has the staging, the preparation and the checks before the pause;
``unprepared`` is the pause of a version that was not prepared; ``request`` is the time of a request
for a few tokens, one after the other, before and during a preparation; ``memory`` is what the
server holds, at rest and at most while it prepares. Peers, all by turns on the same server:

- what vLLM has without a transfer engine: pause, its ``reload_weights`` from the checkpoint,
  resume; from the disk, and (in the details) from the page cache
- what training loops do instead: pause, tensors pickled through an RPC, resume (`pickled_rpc`). In
  the end the server must answer with the weights of either way alike.

Needs ``make vllm-env`` and its folder as ``VLLM_ENV``.
"""

import os
import statistics
import tempfile
import threading
import time
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Final

import httpx
import torch
from safetensors.torch import load_file
from trainsync.engines.servers.preparing import Preparation, PreparationOutcome
from trainsync.engines.servers.vllm import VLLMServer
from trainsync.storage.digest import drop_cached
from trainsync.weights.staging.area import StagingArea
from trainsync.weights.staging.index import StagedReference

from tests.bench.harness import Figure, seconds, spread
from tests.bench.weights.peers import pickled_rpc
from tests.vllm.support.server import CALL_SECONDS, Server, environment, serve
from tests.vllm.support.tiny_model import PROMPT, make_dense, version_of

ROUNDS: Final = int(os.environ.get("TRAINSYNC_BENCH_ROUNDS", "7"))
WARM_UP: Final = 2
_TOKENS: Final = 8
_REQUESTS: Final = 5
_NEAR: Final = 1e-3  # in nats: the same weights on the same server
SHAPE: Final = {
    "vocab_size": 32_000,
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 15,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "head_dim": 64,
}


def _reload(url: str) -> float:
    started = time.perf_counter()
    with httpx.Client(base_url=url, timeout=CALL_SECONDS, trust_env=False) as client:
        calls = (
            ("/pause?mode=keep", None),
            ("/collective_rpc", {"method": "reload_weights"}),
            ("/resume", None),
        )
        for path, body in calls:
            client.post(path, json=body).raise_for_status()
    return time.perf_counter() - started


def _start(model: Path, scratch: Path) -> Server:
    """A server whose workers take weights in both ways."""
    peers = str(Path(pickled_rpc.__file__).parent)
    paths = os.pathsep.join((environment(scratch / "plugin")["PYTHONPATH"], peers))
    return serve(model, scratch, *pickled_rpc.OPTIONS, variables={"PYTHONPATH": paths})


def _said(server: Server) -> list[float]:
    """Log-probabilities that tell the server's weights."""
    answer = server.complete(PROMPT, _TOKENS)
    return [*answer["token_ids"], *answer["logprobs"]["token_logprobs"]]


def _differ(one: list[float], other: list[float]) -> bool:
    return max(abs(a - b) for a, b in zip(one, other, strict=True)) > _NEAR


def _held_bytes(server: Server) -> float:
    """Memory of the server's processes, but for shared memory and files."""
    total = 0
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended
            if os.getpgid(int(folder.name)) == server.process.pid:
                rows = (folder / "smaps_rollup").read_text().splitlines()
                found = [int(row.split()[1]) for row in rows if row.startswith("Pss_Anon:")]
                total += sum(found) << 10
    return float(total)


def _answered_meanwhile(
    server: Server, driver: VLLMServer, version: int, staged: StagedReference
) -> tuple[float, float, float]:
    """Median seconds of a request before and during a preparation, and the most bytes held."""
    before = [seconds(lambda: _said(server)) for _ in range(_REQUESTS)]
    ended: list[Preparation] = []
    preparing = threading.Thread(
        target=lambda: ended.append(driver.prepare(CALL_SECONDS, version, staged, lambda: None))
    )
    preparing.start()
    during, most = [], 0.0
    while preparing.is_alive():
        during.append(seconds(lambda: _said(server)))
        most = max(most, _held_bytes(server))
    preparing.join()
    assert ended, "the preparation raised"
    assert ended[0].outcome is PreparationOutcome.PREPARED, ended[0].reason
    return statistics.median(before), statistics.median(during), most


def run() -> list[Figure]:
    """`vllm_update_vs_reload`, `…_vs_http_tensor` and `vllm_pause_vs_memcpy`: medians of ratios."""
    with ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        model = make_dense(scratch / "model", **SHAPE)
        server = _start(model, scratch)
        stack.callback(server.stop)
        driver = stack.enter_context(VLLMServer(server.url, timeout=CALL_SECONDS))
        area = StagingArea()
        stack.callback(area.close)
        file = model / "model.safetensors"
        # Copies: what is mapped stays in the page cache.
        weights = {name: tensor.clone() for name, tensor in load_file(file).items()}
        size = sum(tensor.nbytes for tensor in weights.values())
        source = torch.zeros(size, dtype=torch.uint8)
        target = torch.zeros_like(source)
        os.sync()  # what is not on the disk cannot leave the page cache
        names = (
            "update", "prepare", "stage", "whole_update", "unprepared", "request",
            "request_preparing", "reload", "warm_reload", "http_tensor", "memcpy",
        )  # fmt: skip
        times: dict[str, list[float]] = {name: [] for name in names}
        memory: dict[str, list[float]] = {"memory": [], "memory_preparing": []}
        for version in range(WARM_UP + ROUNDS):
            started = time.perf_counter()
            staged = area.stage(version, weights)
            times["stage"].append(time.perf_counter() - started)
            prepared = driver.prepare(CALL_SECONDS, version, staged, lambda: None)
            assert prepared.outcome is PreparationOutcome.PREPARED, prepared.reason
            times["prepare"].append(prepared.seconds)
            times["update"].append(driver.update(version, staged).pause_seconds)
            times["whole_update"].append(time.perf_counter() - started)
            memory["memory"].append(_held_bytes(server))
            before, during, most = _answered_meanwhile(server, driver, version, staged)
            times["request"].append(before)
            times["request_preparing"].append(during)
            memory["memory_preparing"].append(most)
            driver.update(version, staged)
            times["unprepared"].append(driver.update(version, staged).pause_seconds)
            drop_cached(file)
            times["reload"].append(_reload(server.url))
            times["warm_reload"].append(_reload(server.url))
            times["http_tensor"].append(pickled_rpc.send(server.url, weights, CALL_SECONDS))
            times["memcpy"].append(seconds(lambda: target.copy_(source)))
        before = _said(server)
        weights = version_of(model, 1)
        pickled_rpc.send(server.url, weights, CALL_SECONDS)
        pickled = _said(server)
        driver.update(WARM_UP + ROUNDS, area.stage(WARM_UP + ROUNDS, weights))
        assert _differ(before, pickled), "the peer's weights were not loaded"
        assert not _differ(pickled, _said(server)), "the ways load different weights"
    details = {"bytes": float(size), "rounds": float(ROUNDS)}
    for name, values in times.items():
        details |= spread(f"{name}_seconds", values[WARM_UP:])
    for name, values in memory.items():
        details |= spread(f"{name}_bytes", values[WARM_UP:])
    rounds = range(WARM_UP, WARM_UP + ROUNDS)
    return [
        Figure(
            "vllm_update_vs_reload",
            statistics.median(times["reload"][n] / times["update"][n] for n in rounds),
            "times as fast",
            ">= 3",
            "pause, vLLM's reload_weights from the disk, resume",
            details,
        ),
        Figure(
            "vllm_update_vs_http_tensor",
            statistics.median(times["http_tensor"][n] / times["update"][n] for n in rounds),
            "times as fast",
            ">= 3",
            "pause, tensors pickled through vLLM's collective_rpc over HTTP, resume",
            details,
        ),
        Figure(
            "vllm_pause_vs_memcpy",
            statistics.median(times["update"][n] / times["memcpy"][n] for n in rounds),
            "of the peer's time",
            "<= 3",
            "one flat warm copy of the same bytes",
            details,
        ),
    ]
