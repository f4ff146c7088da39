"""How long an update pauses a server by each route: ``SGLANG_ENV=… python -m tests.sglang.pauses``.

One server of a model of 0.5 GB on this machine's CPU, the routes in turn, a line of JSON for each.

On 2026-11-30, two cores with a load of 7 to 28, 15 updates, median (least): disk 0.77 (0.23) s,
tensor 1.28 (0.46) s, distributed 1.77 (0.59) s.
"""

import json
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Final, get_args

from safetensors.torch import load_file
from trainsync.engines.servers.sglang import SGLangServer
from trainsync.engines.servers.sglang_routes.base import SGLangRoute
from trainsync.weights.staging.area import StagingArea

from tests.sglang.server import serve
from tests.vllm.support.server import CALL_SECONDS
from tests.vllm.support.tiny_model import make_dense

_SHAPE: Final = {
    "vocab_size": 32_000,
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 12,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "head_dim": 64,
}


def _main(rounds: int) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        model = make_dense(Path(scratch, "model"), **_SHAPE)
        weights = load_file(model / "model.safetensors")
        server = serve(model, Path(scratch))
        area = StagingArea()
        drivers = {
            route: SGLangServer(server.url, timeout=CALL_SECONDS, route=route)
            for route in get_args(SGLangRoute)
        }
        updates: dict[str, list[tuple[float, float]]] = {route: [] for route in drivers}
        try:
            for version in range(rounds + 1):
                staged = area.stage(version, weights)
                for route, driver in drivers.items():
                    done = driver.update(version, staged, f"{version}")
                    if version:  # the first of each route makes its group
                        updates[route].append((done.pause_seconds, done.prepare_seconds))
        finally:
            for driver in drivers.values():
                driver.close()
            area.close()
            server.kill()
    for route, found in updates.items():
        pauses, before = ([seconds[i] for seconds in found] for i in (0, 1))
        line = {
            "route": route,
            "bytes": sum(tensor.nbytes for tensor in weights.values()),
            "pause": {"median": round(median(pauses), 3), "least": round(min(pauses), 3)},
            "before": {"median": round(median(before), 3), "least": round(min(before), 3)},
        }
        sys.stdout.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    _main(int(sys.argv[1]) if len(sys.argv) > 1 else 9)
