"""A server's adapter is of one version, or is known not to be served."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from safetensors.torch import load_file
from trainsync.api.protocol import ASLEEP
from trainsync.engines.servers.adapter import (
    CHECK_ADAPTER,
    FORGET_ADAPTERS,
    Adapter,
    AdapterConfigError,
)
from trainsync.engines.servers.errors import ServerPausedError, UpdateRefusedError
from trainsync.engines.servers.tags import DISCARDED
from trainsync.engines.servers.vllm_adapter import VLLMAdapterServer
from trainsync.weights.errors import SchemaMismatchError
from trainsync.weights.staging.area import StagingArea

Weights = dict[str, torch.Tensor]
Answer = Callable[[dict[str, Any] | None], httpx.Response]

_CONFIG = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["q_proj"]}
_LAYER = "base_model.model.model.layers.0.q_proj"
_OTHER = "base_model.model.model.layers.0.v_proj"


def _version(number: int) -> Weights:
    return {
        f"{_LAYER}.lora_A.default.weight": torch.full((2, 8), float(number)),
        f"{_LAYER}.lora_B.default.weight": torch.full((8, 2), float(number)),
    }


class FakeServer(httpx.BaseTransport):
    """The endpoints of ``vllm serve --enable-lora``, whose one worker reads adapters' files.

    Attributes:
        adapters: path by name.
        serves: what the worker has read; empty: it reads the path at the next request.
    """

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.adapters: dict[str, str] = {}
        self.serves: Weights = {}
        self.version = "default"
        self.paused = False
        self.instead: dict[str, Answer] = {}

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        body = json.loads(request.content) if request.content else None
        path = request.url.path
        call = body["method"] if path == "/collective_rpc" else path
        self.calls.append(f"{request.method} {call}" if request.method == "GET" else call)
        if call in self.instead:
            return self.instead[call](body)
        return self._answer(request.method, call, body or {})

    def _answer(self, method: str, call: str, body: dict[str, Any]) -> httpx.Response:
        said: dict[str, Any] = {}
        match call:
            case "/v1/load_lora_adapter" if method == "GET":
                return httpx.Response(405, text="")
            case "/v1/load_lora_adapter":
                assert not body.get("load_inplace"), "vLLM would read it in every step"
                self.adapters[body["lora_name"]] = body["lora_path"]
                self.read()
                return httpx.Response(200, text="Success")
            case "/v1/models":
                said = {"data": [{"id": "base", "root": "/models/base", "parent": None}]}
                said["data"] += [
                    {"id": n, "root": path, "parent": "base"} for n, path in self.adapters.items()
                ]
            case "trainsync_check_adapter":
                assert load_file(Path(body["kwargs"]["folder"]) / "adapter_model.safetensors")
                assert not self.paused
                said = {"results": ["True"]}
            case "trainsync_forget_adapters":
                assert self.paused
                self.serves = {}
                said = {"results": ["True"]}
            case "/pause" | "/resume":
                self.paused = call == "/pause"
            case "/is_paused":
                said = {"is_paused": self.paused}
            case "/reset_prefix_cache":
                said = {"success": True}
            case "/update_weight_version":
                self.version = body["new_version"]
            case "/weight_info":
                said = {"weight_version": self.version}
            case _:
                raise AssertionError(call)
        return httpx.Response(200, json=said)

    def read(self) -> Weights:
        """What a request for the adapter is answered with."""
        if not self.serves:
            folder = Path(self.adapters["mine"])
            assert json.loads((folder / "adapter_config.json").read_text()) == _CONFIG
            self.serves = load_file(folder / "adapter_model.safetensors")
        return self.serves


@pytest.fixture
def server() -> FakeServer:
    return FakeServer()


@pytest.fixture
def area(tmp_path: Path) -> Iterator[StagingArea]:
    made = StagingArea(tmp_path)
    yield made
    made.close()


@pytest.fixture
def driver(server: FakeServer, tmp_path: Path) -> Iterator[VLLMAdapterServer]:
    adapter = Adapter("mine", _CONFIG, 2)
    with VLLMAdapterServer("http://server:8000", adapter, tmp_path, transport=server) as made:
        yield made


def _has(server: FakeServer, number: int) -> bool:
    wanted = {name.replace(".default", ""): tensor for name, tensor in _version(number).items()}
    has = server.read()
    return has.keys() == wanted.keys() and all(torch.equal(has[n], t) for n, t in wanted.items())


def test_each_version_is_read_from_one_path_after_the_last_is_forgotten(
    server: FakeServer, driver: VLLMAdapterServer, area: StagingArea
) -> None:
    paths = set()
    for version in (1, 2, 3):
        driver.update(version, area.stage(version, _version(version)), f"{version}-tag")
        assert _has(server, version)
        assert driver.tag() == f"{version}-tag"
        paths.add(server.adapters["mine"])
    assert len(paths) == 1
    assert server.calls.count("/v1/load_lora_adapter") == 1
    home = Path(paths.pop()).parent
    assert len(list(home.iterdir())) == 2, "the link, and the version that it names"
    assert driver._asked() == {"model": "mine"}


@pytest.mark.parametrize(
    ("name", "message"), [("mine", "mine from /models/mine"), ("base", "is called base")]
)
def test_a_name_that_the_server_has_from_elsewhere_is_refused_before_the_pause(
    server: FakeServer, area: StagingArea, tmp_path: Path, name: str, message: str
) -> None:
    server.adapters["mine"] = "/models/mine"  # running requests would go on to read it
    adapter = Adapter(name, _CONFIG, 2)
    with (
        VLLMAdapterServer("http://server:8000", adapter, tmp_path, transport=server) as driver,
        pytest.raises(UpdateRefusedError, match=message),
    ):
        driver.update(1, area.stage(1, _version(1)))
    assert "/pause" not in server.calls
    assert server.adapters == {"mine": "/models/mine"}


def test_a_link_that_cannot_be_moved_leaves_the_server_serving(
    server: FakeServer, driver: VLLMAdapterServer, area: StagingArea
) -> None:
    (driver._home / "current").mkdir(parents=True)
    with pytest.raises(UpdateRefusedError, match="current cannot be moved"):
        driver.update(1, area.stage(1, _version(1)))
    assert not server.paused


def test_a_driver_finds_the_folder_of_one_before_under_another_name_of_this_host(
    server: FakeServer, tmp_path: Path
) -> None:
    adapter = Adapter("mine", _CONFIG, 2)
    homes = []
    for url in ("http://localhost", "http://127.0.0.1:80", "http://127.0.0.1:81"):
        with VLLMAdapterServer(url, adapter, tmp_path, transport=server) as made:
            homes.append(made._home)
    assert homes[0] == homes[1] != homes[2]


def test_a_home_that_leads_elsewhere_is_refused_and_what_is_there_stays(
    server: FakeServer, driver: VLLMAdapterServer, area: StagingArea, tmp_path: Path
) -> None:
    theirs = tmp_path / "theirs" / "folder"
    theirs.mkdir(parents=True)
    driver._home.symlink_to(theirs.parent)
    with pytest.raises(UpdateRefusedError, match="belongs to another user"):
        driver.update(1, area.stage(1, _version(1)))
    assert theirs.is_dir()
    assert not server.paused


def test_a_version_that_no_worker_can_load_is_refused_before_the_pause(
    server: FakeServer, driver: VLLMAdapterServer, area: StagingArea
) -> None:
    driver.update(1, area.stage(1, _version(1)), "first")
    server.instead[CHECK_ADAPTER] = lambda _: httpx.Response(500, json={"error": "rank 99"})
    calls = len(server.calls)
    with pytest.raises(UpdateRefusedError, match="rank 99"):
        driver.update(2, area.stage(2, _version(2)))
    assert "/pause" not in server.calls[calls:]
    assert driver.tag() == "first"
    server.serves = {}
    assert _has(server, 1), "what the path names is what the server has"


def test_a_worker_that_does_not_forget_leaves_the_server_paused_until_the_next_update(
    server: FakeServer, driver: VLLMAdapterServer, area: StagingArea
) -> None:
    driver.update(1, area.stage(1, _version(1)))
    server.instead[FORGET_ADAPTERS] = lambda _: httpx.Response(200, json={"results": [None]})
    with pytest.raises(ServerPausedError, match="did not do trainsync_forget_adapters"):
        driver.update(2, area.stage(2, _version(2)))
    assert server.paused
    server.instead.clear()
    del server.calls[:]
    server.instead[CHECK_ADAPTER] = lambda _: httpx.Response(200, json={"results": ["True"]})
    driver.update(3, area.stage(3, _version(3)))
    assert not server.paused
    assert _has(server, 3)


@pytest.mark.parametrize(("tag", "message"), [(ASLEEP, "sleeps"), (DISCARDED, "start it anew")])
def test_a_server_without_its_base_model_gets_no_adapter(
    server: FakeServer, driver: VLLMAdapterServer, area: StagingArea, tag: str, message: str
) -> None:
    driver.update(1, area.stage(1, _version(1)))
    server.version = tag
    with pytest.raises(UpdateRefusedError, match=message):
        driver.update(2, area.stage(2, _version(2)))
    assert _has(server, 1)


@pytest.mark.parametrize("call", ["/pause", FORGET_ADAPTERS])
def test_an_update_that_the_base_model_is_lost_in_leaves_no_name(
    server: FakeServer, driver: VLLMAdapterServer, area: StagingArea, call: str
) -> None:
    driver.update(1, area.stage(1, _version(1)))

    def lose(body: Any) -> httpx.Response:
        del server.instead[call]
        server.version = DISCARDED
        return server._answer("POST", call, body or {})

    server.instead[call] = lose
    with pytest.raises(ServerPausedError, match="start it anew"):
        driver.update(2, area.stage(2, _version(2)))
    assert (server.version, server.paused) == (DISCARDED, True)


def test_weights_are_of_a_version_only_with_our_adapter_and_its_configuration(
    server: FakeServer, driver: VLLMAdapterServer, area: StagingArea, tmp_path: Path
) -> None:
    """Another process may have brought them, whose tag the server still says."""
    assert driver.tag() == "default"
    driver.update(1, area.stage(1, _version(1)))
    assert driver.version() == 1
    for adapter in (Adapter("mine", {**_CONFIG, "lora_alpha": 8}, 2), Adapter("other", _CONFIG, 2)):
        with VLLMAdapterServer("http://server:8000", adapter, tmp_path, transport=server) as next_:
            assert next_.version() is None
            assert next_.tag() == f"1, without our adapter {adapter.name}"
    server.adapters.clear()
    assert driver.version() is None
    driver.update(1, area.stage(1, _version(1)))
    assert driver.version() == 1


def test_a_server_without_the_endpoint_is_refused(
    server: FakeServer, driver: VLLMAdapterServer, area: StagingArea
) -> None:
    server.instead["/v1/load_lora_adapter"] = lambda _: httpx.Response(404, json={})
    with pytest.raises(UpdateRefusedError, match="VLLM_ALLOW_RUNTIME_LORA_UPDATING=1"):
        driver.update(1, area.stage(1, _version(1)))
    assert not server.paused


@pytest.mark.parametrize(
    ("version", "message"),
    [
        ({**_version(1), "model.norm.weight": torch.zeros(8)}, "1 of 3 tensors are none of a LoRA"),
        ({}, "0 of 0 tensors"),
        ({f"{_LAYER}.lora_A.default.weight": torch.zeros(3, 8)}, "expected a matrix of rank 2"),
        ({f"{_LAYER}.lora_A.default.weight": torch.zeros(2)}, "expected a matrix of rank 2"),
        (
            {f"{_LAYER}.lora_A.{name}.weight": torch.zeros(2, 8) for name in ("one", "other")},
            "has several adapters",
        ),
        (
            {
                **_version(1),
                f"{_OTHER}.lora_A.other.weight": torch.zeros(2, 8),
                f"{_OTHER}.lora_B.other.weight": torch.zeros(8, 2),
            },
            "has several adapters",
        ),
        (
            {**_version(1), f"{_OTHER}.lora_A.default.weight": torch.zeros(2, 8)},
            "v_proj has lora_A alone",
        ),
    ],
)
def test_tensors_that_are_none_of_the_adapter_are_refused(version: Weights, message: str) -> None:
    with pytest.raises(SchemaMismatchError, match=message):
        Adapter("mine", _CONFIG, 2).tensors(version)


def test_factors_of_two_ranks_are_refused_where_the_configuration_has_several() -> None:
    version = {**_version(1), f"{_LAYER}.lora_B.default.weight": torch.zeros(8, 3)}
    with pytest.raises(SchemaMismatchError, match=r"q_proj has factors of ranks \[2, 3\]"):
        Adapter("mine", _CONFIG, None).tensors(version)
    with pytest.raises(SchemaMismatchError, match=r"is \[2\], expected a matrix$"):
        Adapter("mine", _CONFIG, None).tensors({f"{_LAYER}.lora_A.weight": torch.zeros(2)})


@pytest.mark.parametrize(
    "text", ["", "[]", '{"peft_type": "LORA"}', '{"peft_type": "IA3", "r": 2}', '{"r": 0}']
)
def test_a_file_that_is_no_configuration_of_lora_is_refused(text: str, tmp_path: Path) -> None:
    file = tmp_path / "adapter_config.json"
    file.write_text(text)
    with pytest.raises(AdapterConfigError, match=r"adapter_config\.json (cannot be read|is no)"):
        Adapter.read("mine", file)
