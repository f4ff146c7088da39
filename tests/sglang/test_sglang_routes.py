"""By each route a real server serves exactly the version that was staged, or the one it had."""

import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any, get_args

import httpx
import pytest
from trainsync.engines.servers.errors import ServerPausedError, UpdateRefusedError
from trainsync.engines.servers.sglang import SGLangServer
from trainsync.engines.servers.sglang_routes.base import SGLangRoute
from trainsync.weights.staging.area import StagingArea
from trainsync.weights.transports.process_group import generation

from tests.sglang.conftest import Serves
from tests.sglang.server import Server
from tests.vllm.conftest import APART, TOLERANCE
from tests.vllm.support.server import CALL_SECONDS, ROOT
from tests.vllm.support.tiny_model import PROMPT, Reference, version_of

_BUCKET = 40_000  # bytes: a few buckets, and tensors that are larger
_LONG = 400  # tokens: seconds, and an update takes a fraction of one
_ROUTES = pytest.mark.parametrize("route", ["tensor", "distributed"])

Drive = Callable[[Server, SGLangRoute], SGLangServer]


@pytest.fixture
def drive() -> Iterator[Drive]:
    made: list[SGLangServer] = []

    def do(server: Server, route: SGLangRoute) -> SGLangServer:
        made.append(
            SGLangServer(server.url, timeout=CALL_SECONDS, route=route, bucket_bytes=_BUCKET)
        )
        return made[-1]

    yield do
    for driver in made:
        driver.close()


@_ROUTES
def test_a_server_serves_each_version_that_is_staged(
    route: SGLangRoute, server: Server, drive: Drive, model: Path, area: StagingArea, serves: Serves
) -> None:
    driver = drive(server, route)
    for version in (1, 2, 3):
        weights = version_of(model, version)
        assert driver.update(version, area.stage(version, weights)).version == version
        assert driver.version() == version
        assert not driver.is_paused()
        assert serves(server, model, weights)
        assert not serves(server, model, version_of(model, version + 1))
    by_route = driver.checksums()
    with SGLangServer(server.url, timeout=CALL_SECONDS) as by_disk:
        by_disk.update(4, area.stage(4, version_of(model, 4)))
        assert by_disk.checksums() != by_route
        by_disk.update(3, area.stage(3, version_of(model, 3)))
        assert by_disk.checksums() == by_route


@pytest.mark.parametrize("route", get_args(SGLangRoute))
def test_a_request_that_runs_goes_on_with_the_new_weights(
    route: SGLangRoute,
    server: Server,
    drive: Drive,
    model: Path,
    area: StagingArea,
    tmp_path: Path,
) -> None:
    old, new = version_of(model, 21), version_of(model, 22)
    driver = drive(server, route)
    driver.update(21, area.stage(21, old))
    staged = area.stage(22, new)
    began, found = threading.Event(), []
    thread = threading.Thread(
        target=lambda: found.append(server.stream(PROMPT, _LONG, began)), daemon=True
    )
    thread.start()
    assert began.wait(CALL_SECONDS)
    driver.update(22, staged)
    thread.join(CALL_SECONDS)
    assert not thread.is_alive()

    said, tokens = ([row[i] for row in found[0]["output_token_logprobs"]] for i in (0, 1))
    assert len(tokens) == _LONG
    spans = [(span["version"], span["start"], span["end"]) for span in found[0]["weight_versions"]]
    assert [version for version, _, _ in spans] == ["21", "22"]
    by_old = Reference(model, old, tmp_path / "old").logprobs(tokens)
    by_new = Reference(model, new, tmp_path / "new").logprobs(tokens)
    # The prompt and the first tokens are computed anew: nothing of the old weights is left.
    for by, other, (_, start, end) in zip((by_old, by_new), (by_new, by_old), spans, strict=True):
        pairs = list(zip(said, by, other, strict=True))[start:end]
        assert median(abs(a - b) for a, b, _ in pairs) < TOLERANCE
        assert median(abs(a - c) for a, _, c in pairs) > APART


@_ROUTES
def test_a_tensor_that_does_not_fit_is_refused_and_the_old_ones_served(
    route: SGLangRoute, server: Server, drive: Drive, model: Path, area: StagingArea, serves: Serves
) -> None:
    driver, had, wrong = drive(server, route), version_of(model, 41), version_of(model, 42)
    driver.update(41, area.stage(41, had))
    name = "model.layers.0.mlp.down_proj.weight"
    with pytest.raises(UpdateRefusedError, match=r"\[128, 64\] instead of bfloat16\[64, 128\]"):
        driver.update(42, area.stage(42, {**wrong, name: wrong[name].t().contiguous()}))
    assert (driver.version(), driver.is_paused()) == (41, False)
    assert serves(server, model, had)


@_ROUTES
def test_a_driver_that_dies_between_two_buckets_leaves_a_server_that_the_next_update_mends(
    route: SGLangRoute, server: Server, drive: Drive, model: Path, area: StagingArea, serves: Serves
) -> None:
    driver = drive(server, route)
    driver.update(61, area.stage(61, version_of(model, 61)))
    staged = area.stage(62, version_of(model, 62))
    script = ROOT / "tests" / "sglang" / "killed_driver.py"
    died = subprocess.run(
        [sys.executable, script, server.url, "bucket", staged.index, staged.digest, route],
        timeout=CALL_SECONDS,
        check=False,
    )
    assert died.returncode == -9
    assert driver.is_paused()
    assert driver.version() == 61
    new = version_of(model, 63)
    drive(server, route).update(63, area.stage(63, new))
    assert not driver.is_paused()
    assert serves(server, model, new)


def test_a_worker_that_waits_for_a_broadcast_that_does_not_come_is_let_go(
    server: Server, drive: Drive, model: Path, area: StagingArea, serves: Serves,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    class Never:
        def is_completed(self) -> bool:
            return False

    new = version_of(model, 72)
    with SGLangServer(server.url, timeout=10.0, route="distributed") as hasty:
        hasty.update(71, area.stage(71, version_of(model, 71)))
        with monkeypatch.context() as patched:
            patched.setattr(generation, "begin_broadcast", lambda *_: Never())
            with pytest.raises(ServerPausedError, match=r"deadline has passed|did not answer"):
                hasty.update(72, area.stage(72, new))
        assert hasty.is_paused()
        hasty.update(72, area.stage(72, new))
        assert not hasty.is_paused()
    assert serves(server, model, new)
    assert server.process.poll() is None


def test_the_server_tells_of_its_parts_and_of_its_start(
    server: Server, drive: Drive, model: Path, area: StagingArea
) -> None:
    """Without them a server of several parts is updated, and a group made for each version."""

    def info() -> dict[str, Any]:
        url = f"{server.url}/server_info"
        return dict(httpx.get(url, timeout=CALL_SECONDS, trust_env=False).json())

    before = info()
    assert [before[name] for name in ("tp_size", "dp_size", "pp_size", "nnodes")] == [1, 1, 1, 1]
    assert before["startup_time"]["scheduler_e2e"] > 0
    drive(server, "distributed").update(81, area.stage(81, version_of(model, 81)))
    assert info()["startup_time"] == before["startup_time"]


def test_the_requests_are_of_the_servers_own_classes(server: Server) -> None:
    """What is no field of SGLang's would be dropped, and an update silently do something else."""
    paths = httpx.get(f"{server.url}/openapi.json", timeout=CALL_SECONDS, trust_env=False).json()
    fields = {
        "/begin_weight_update": set[str](),
        "/end_weight_update": set[str](),
        "/update_weights_from_tensor": {"serialized_named_tensors", "flush_cache"},
        "/init_weights_update_group": {
            "master_address", "master_port", "rank_offset", "world_size", "group_name", "backend",
        },
        "/destroy_weights_update_group": {"group_name"},
        "/update_weights_from_distributed": {
            "names", "dtypes", "shapes", "group_name", "load_format", "flush_cache",
        },
        "/update_weight_version": {"new_version", "abort_all_requests"},
    }  # fmt: skip
    for path, sent in fields.items():
        body = paths["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
        named = body["$ref"].rpartition("/")[2] if "$ref" in body else ""
        schema = paths["components"]["schemas"][named] if named else body
        assert sent <= schema.get("properties", {}).keys(), path
