"""By each route a server gets the staged version under the same promises."""

import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from trainsync.engines.servers.errors import ServerPausedError, UpdateRefusedError
from trainsync.engines.servers.kinds import driver_of
from trainsync.engines.servers.sglang import SGLangServer
from trainsync.engines.servers.sglang_routes import handles
from trainsync.engines.servers.sglang_routes.base import SGLangRoute
from trainsync.weights.errors import SharedMemoryError
from trainsync.weights.staging.area import StagingArea
from trainsync.weights.staging.index import StagedReference
from trainsync.weights.transports.shared_memory.segment import SHARED_MEMORY

from tests.unit.engines.servers.fake_routes import FakeRoutes
from tests.unit.engines.servers.fake_sglang import FakeSGLang

Weights = dict[str, torch.Tensor]
Stage = Callable[[int, Weights], StagedReference]
Drive = Callable[..., SGLangServer]

_UPDATES = {
    "tensor": "/update_weights_from_tensor",
    "distributed": "/update_weights_from_distributed",
}
_BUCKET = 64  # bytes: several of them, and a tensor that is larger
_ROUTES = pytest.mark.parametrize("route", list(_UPDATES))


def _weights(version: int) -> Weights:
    generator = torch.Generator().manual_seed(version)
    return {
        "a.weight": torch.randn(3, 5, generator=generator).bfloat16(),
        "steps": torch.tensor(version),
        "b.weight": torch.randn(7, 11, generator=generator),
        "b.bias": torch.randn(7, generator=generator).half(),
        "empty": torch.empty(0, 4),
        "c.weight": torch.randn(5, generator=generator).bfloat16(),
    }


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    save_file(_weights(0), folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"tie_word_embeddings": False}))
    return folder


@pytest.fixture
def memory(tmp_path: Path) -> Path:
    made = tmp_path / "memory"
    made.mkdir()
    return made


@pytest.fixture
def stage(memory: Path) -> Iterator[Stage]:
    area = StagingArea(memory)
    yield area.stage
    area.close()


@pytest.fixture
def server(model: Path) -> Iterator[FakeSGLang]:
    made = FakeSGLang(model, routes=FakeRoutes)
    yield made
    made.stop()


@pytest.fixture
def drive(server: FakeSGLang, memory: Path) -> Iterator[Drive]:
    """Drivers of the server; none leaves anything in shared memory."""
    made: list[SGLangServer] = []

    def do(route: SGLangRoute, timeout: float = 30, **options: Any) -> SGLangServer:
        options = {"resume_timeout": 30.0, "bucket_bytes": _BUCKET, **options}
        made.append(
            SGLangServer(server.url, timeout=timeout, memory=memory, route=route, **options)
        )
        return made[-1]

    yield do
    for driver in made:
        driver.close()
    assert not list(SHARED_MEMORY.glob(f"torch_{os.getpid()}_*"))


def _has(server: FakeSGLang, weights: Weights) -> bool:
    shown = {name: data for name, (_, _, data) in server.tensors.items()}
    return shown == {
        name: tensor.reshape(-1).view(torch.uint8).numpy().tobytes()
        for name, tensor in weights.items()
    }


@_ROUTES
def test_a_version_comes_in_buckets_to_a_paused_server_that_goes_on_under_its_name(
    route: SGLangRoute, server: FakeSGLang, drive: Drive, stage: Stage
) -> None:
    driver = drive(route)
    flushes: list[bool] = []
    path = _UPDATES[route]

    def look() -> None:
        flushes.append(server.bodies[path]["flush_cache"])
        assert server.tag == "default", "named before it was loaded"

    server.faults[path] = look
    update = driver.update(7, stage(7, _weights(7)), "7-0123456789abcdef")
    assert update.version == 7
    assert _has(server, _weights(7))
    assert flushes == [*[False] * (len(flushes) - 1), True]
    assert len(flushes) > 2
    group = {
        "tensor": [],
        "distributed": ["/destroy_weights_update_group", "/init_weights_update_group"],
    }
    assert server.calls == [
        "/ready", "/server_info", *group[route], "/pause_generation", "/begin_weight_update",
        *[path] * len(flushes), "/end_weight_update", "/update_weight_version", "/model_info",
        "/continue_generation",
    ]  # fmt: skip
    assert (driver.tag(), driver.is_paused()) == ("7-0123456789abcdef", False)
    server.faults.clear()
    server.calls.clear()
    driver.update(8, stage(8, _weights(8)))
    assert _has(server, _weights(8))
    assert driver.tag() == "8"
    assert "/init_weights_update_group" not in server.calls, "the group is kept"


@_ROUTES
def test_each_tensor_parallel_rank_gets_all_of_a_version(
    route: SGLangRoute, server: FakeSGLang, drive: Drive, stage: Stage
) -> None:
    server.parallel["tp_size"] = server.routes.ranks = 2
    driver = drive(route)
    for version in (1, 2):
        driver.update(version, stage(version, _weights(version)))
        assert _has(server, _weights(version))


@_ROUTES
def test_another_model_is_refused_before_the_server_hears_of_it(
    route: SGLangRoute, server: FakeSGLang, drive: Drive, stage: Stage
) -> None:
    with pytest.raises(UpdateRefusedError, match=r"steps is missing"):
        drive(route).update(1, stage(1, {n: t for n, t in _weights(1).items() if n != "steps"}))
    assert server.calls == ["/ready", "/server_info"]


@_ROUTES
@pytest.mark.parametrize(
    ("part", "message"),
    [
        ({"dp_size": 2}, "2 data parallel replicas, which are not updated by route {}: choose"),
        ({"pp_size": 2}, "2 pipeline stages, which are not updated by route {}"),
        ({"nnodes": 3}, "3 nodes, which are not updated by route {}"),
        ({"tp_size": None}, "names None as its tp_size"),
    ],
)
def test_a_server_of_parts_that_the_route_does_not_reach_is_not_paused(
    part: dict[str, Any],
    message: str,
    route: SGLangRoute,
    server: FakeSGLang,
    drive: Drive,
    stage: Stage,
) -> None:
    server.parallel |= part
    with pytest.raises(UpdateRefusedError, match=message.format(route)):
        drive(route).update(1, stage(1, _weights(1)))
    assert "/pause_generation" not in server.calls


@_ROUTES
def test_a_server_without_sessions_serves_what_it_had(
    route: SGLangRoute, server: FakeSGLang, drive: Drive, stage: Stage
) -> None:
    server.faults["/begin_weight_update"] = lambda: (404, {"detail": "Not Found"})
    with pytest.raises(UpdateRefusedError, match="choose route disk"):
        drive(route).update(1, stage(1, _weights(1)))
    assert not server.paused
    assert _has(server, _weights(0))


@_ROUTES
@pytest.mark.parametrize(
    "path", ["/begin_weight_update", "", "/end_weight_update", "/update_weight_version"]
)
def test_a_server_that_fails_in_a_session_is_left_paused_and_mended_by_the_next_update(
    path: str, route: SGLangRoute, server: FakeSGLang, drive: Drive, stage: Stage
) -> None:
    driver = drive(route)
    failing = path or _UPDATES[route]
    server.faults[failing] = lambda: (400, {"success": False, "message": "out of order"})
    with pytest.raises(ServerPausedError, match=r"out of order; .* is left paused"):
        driver.update(1, stage(1, _weights(1)))
    assert driver.is_paused()
    assert server.tag == "default"
    server.faults.clear()
    driver.update(2, stage(2, _weights(2)))
    assert not driver.is_paused()
    assert _has(server, _weights(2))


@_ROUTES
@pytest.mark.parametrize("path", ["/begin_weight_update", "", "/end_weight_update"])
def test_a_server_that_hangs_is_given_up_in_time(
    path: str, route: SGLangRoute, server: FakeSGLang, drive: Drive, stage: Stage
) -> None:
    over = threading.Event()
    server.faults[path or _UPDATES[route]] = lambda: (over.wait(60), None)[1]
    started = time.monotonic()
    try:
        with pytest.raises(ServerPausedError, match=r"did not answer within|deadline has passed"):
            drive(route, timeout=2.0).update(1, stage(1, _weights(1)))
        assert time.monotonic() - started < 30
        assert server.paused
    finally:
        over.set()


def test_a_server_that_does_not_join_the_group_in_time_is_not_paused(
    server: FakeSGLang, drive: Drive, stage: Stage
) -> None:
    over = threading.Event()
    driver = drive("distributed", timeout=2.0)
    server.faults["/init_weights_update_group"] = lambda: (over.wait(60), None)[1]
    try:
        with pytest.raises(UpdateRefusedError, match="did not join a process group"):
            driver.update(1, stage(1, _weights(1)))
    finally:
        over.set()
    server.faults["/init_weights_update_group"] = lambda: (
        400,
        {"success": False, "message": "Failed to initialize custom process group"},
    )
    with pytest.raises(UpdateRefusedError, match="Failed to initialize custom process group"):
        driver.update(1, stage(1, _weights(1)))
    assert "/pause_generation" not in server.calls


def test_a_worker_that_receives_nothing_is_given_up_in_time_and_the_group_left(
    server: FakeSGLang, drive: Drive, stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = drive("distributed", timeout=3.0, bucket_bytes=1 << 24)
    large = {**_weights(1), "b.weight": torch.ones(1 << 21)}
    save_file(large, Path(server._model) / "model.safetensors")
    over = threading.Event()
    received = FakeRoutes.from_distributed
    monkeypatch.setattr(FakeRoutes, "from_distributed", lambda *_: over.wait(60))
    started = time.monotonic()
    try:
        with pytest.raises(ServerPausedError, match="a bucket's deadline has passed"):
            driver.update(1, stage(1, large))
        assert time.monotonic() - started < 30
    finally:
        over.set()
    monkeypatch.setattr(FakeRoutes, "from_distributed", received)
    server.calls.clear()
    driver.update(2, stage(2, large))
    assert server.calls.count("/init_weights_update_group") == 1
    assert not driver.is_paused()


def test_the_group_is_renewed_with_the_server_and_after_a_driver_that_died(
    server: FakeSGLang, drive: Drive, stage: Stage
) -> None:
    first = drive("distributed")
    first.update(1, stage(1, _weights(1)))
    server.stop()
    server.start()
    server.calls.clear()
    first.update(2, stage(2, _weights(2)))
    assert server.calls.count("/init_weights_update_group") == 1
    assert _has(server, _weights(2))
    names = list(server.routes.groups)
    second = drive("distributed")
    second.update(3, stage(3, _weights(3)))
    assert list(server.routes.groups) == names, "that of the driver before is destroyed"
    assert _has(server, _weights(3))


def test_tensors_that_find_no_room_in_shared_memory_are_refused(
    server: FakeSGLang, drive: Drive, stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(folder: Path, size: int) -> None:
        raise SharedMemoryError(f"{folder} has no room for {size} bytes")

    monkeypatch.setattr(handles, "check_room", full)
    with pytest.raises(UpdateRefusedError, match="/dev/shm has no room for"):
        drive("tensor").update(1, stage(1, _weights(1)))
    assert "/pause_generation" not in server.calls


def test_a_route_is_of_sglang_alone(memory: Path) -> None:
    url = "http://127.0.0.1:1"
    with pytest.raises(ValueError, match="vllm has no route tensor"):
        driver_of("vllm", url, memory, timeout=1, sglang_route="tensor")
    with pytest.raises(ValueError, match="no route 'mail': disk, tensor, distributed"):
        driver_of("sglang", url, memory, timeout=1, sglang_route="mail")  # type: ignore[arg-type]
