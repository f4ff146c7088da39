"""After each update a server serves one version, or is known not to serve."""

import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from trainsync.engines.servers.base import ServerDriver
from trainsync.engines.servers.errors import ServerError, ServerPausedError, UpdateRefusedError
from trainsync.engines.servers.kinds import driver_of
from trainsync.engines.servers.sglang import SGLangServer
from trainsync.engines.servers.sglang_routes import disk
from trainsync.weights.staging.area import StagingArea
from trainsync.weights.staging.index import StagedReference

from tests.unit.engines.servers import fake_sglang
from tests.unit.engines.servers.fake_sglang import FakeSGLang

Weights = dict[str, torch.Tensor]

_UPDATE = "/update_weights_from_disk"
_HEAD = "lm_head.weight"


def _weights(version: int) -> Weights:
    return {
        "model.embed_tokens.weight": torch.full((4, 2), float(version), dtype=torch.bfloat16),
        "model.norm.weight": torch.full((2,), version + 0.5),
        "steps": torch.tensor(version),
    }


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    head = {_HEAD: torch.zeros(4, 2, dtype=torch.bfloat16)}
    save_file({**_weights(0), **head}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"tie_word_embeddings": False}))
    return folder


@pytest.fixture
def memory(tmp_path: Path) -> Path:
    made = tmp_path / "memory"
    made.mkdir()
    return made


@pytest.fixture
def stage(memory: Path) -> Iterator[Callable[[int, Weights], StagedReference]]:
    area = StagingArea(memory)
    yield area.stage
    # The driver leaves nothing beside the versions that are staged.
    assert not [path for path in memory.rglob("*") if "checkpoint" in path.name]
    area.close()


Stage = Callable[[int, Weights], StagedReference]


@pytest.fixture
def server(model: Path) -> Iterator[FakeSGLang]:
    made = FakeSGLang(model)
    yield made
    assert not made.ended
    made.stop()


@pytest.fixture
def driver(server: FakeSGLang, memory: Path) -> Iterator[SGLangServer]:
    with SGLangServer(server.url, timeout=30, memory=memory) as made:
        yield made


def _full(version: int) -> Weights:
    return {**_weights(version), _HEAD: torch.full((4, 2), version + 0.25, dtype=torch.bfloat16)}


def _has(server: FakeSGLang, weights: Weights) -> bool:
    shown = {name: data for name, (_, _, data) in server.tensors.items()}
    return shown == {
        name: tensor.reshape(-1).view(torch.uint8).numpy().tobytes()
        for name, tensor in weights.items()
    }


def test_a_version_is_read_by_a_paused_server_that_goes_on_under_its_name(
    server: FakeSGLang, driver: SGLangServer, stage: Stage
) -> None:
    update = driver.update(7, stage(7, _full(7)), "7-0123456789abcdef")
    assert update.version == 7
    assert update.pause_seconds >= 0
    assert server.calls == [
        "/ready", "/server_info", "/pause_generation", _UPDATE, "/model_info",
        "/continue_generation",
    ]  # fmt: skip
    assert server.bodies["/pause_generation"] == {"mode": "retract"}
    assert server.bodies[_UPDATE]["load_format"] == "safetensors"
    assert _has(server, _full(7))
    assert driver.tag() == "7-0123456789abcdef"
    assert driver.version() == 7
    assert not driver.is_paused()
    driver.update(8, stage(8, _full(8)))
    assert driver.tag() == "8"
    assert _has(server, _full(8))


def test_a_driver_is_made_by_the_name_of_its_engine(server: FakeSGLang, memory: Path) -> None:
    driver: ServerDriver = driver_of("sglang", server.url, memory, timeout=30, pause="abort")
    assert driver.tag() == "default"
    assert driver.version() is None
    with pytest.raises(ValueError, match="cannot pause by 'wait': keep, abort"):
        driver_of("sglang", server.url, memory, timeout=30, pause="wait")


def test_running_requests_are_aborted_where_that_is_wanted(
    server: FakeSGLang, memory: Path, stage: Stage
) -> None:
    with SGLangServer(server.url, pause="abort", memory=memory) as driver:
        driver.update(1, stage(1, _full(1)))
    assert server.bodies["/pause_generation"] == {"mode": "abort"}


def test_a_tied_head_is_not_loaded_twice(
    server: FakeSGLang, driver: SGLangServer, stage: Stage, model: Path
) -> None:
    (model / "config.json").write_text(json.dumps({"text_config": {"tie_word_embeddings": True}}))
    had = server.tensors[_HEAD]
    driver.update(1, stage(1, _full(1)))
    assert server.tensors[_HEAD] == had
    driver.update(2, stage(2, _weights(2)))
    assert driver.version() == 2


def _renamed(weights: Weights) -> Weights:
    return {name.replace("norm", "norm_of_another"): tensor for name, tensor in weights.items()}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_renamed, "model.norm.weight is missing"),
        (lambda w: {**w, "more": torch.zeros(1)}, "more"),
        (lambda w: {**w, _HEAD: w[_HEAD].float()}, "float32.* instead of bfloat16"),
        (lambda w: {**w, _HEAD: w[_HEAD].t().contiguous()}, r"\[2, 4\] instead of bfloat16\[4, 2"),
        (lambda w: {n: t for n, t in w.items() if n != "steps"}, "steps is missing"),
    ],
)
def test_another_model_is_refused_before_the_server_hears_of_it(
    change: Callable[[Weights], Weights],
    message: str,
    server: FakeSGLang,
    driver: SGLangServer,
    stage: Stage,
) -> None:
    driver.update(1, stage(1, _full(1)))
    server.calls.clear()
    with pytest.raises(UpdateRefusedError, match=message):
        driver.update(2, stage(2, change(_full(2))))
    assert server.calls == ["/ready", "/server_info"]
    assert _has(server, _full(1))
    assert driver.version() == 1


def test_floating_point_weights_may_come_in_the_servers_dtype(
    model: Path, memory: Path, stage: Stage
) -> None:
    server = FakeSGLang(model, dtype="float16")
    try:
        with SGLangServer(server.url, memory=memory) as driver:
            half = {n: t.half() if t.is_floating_point() else t for n, t in _full(1).items()}
            assert driver.update(1, stage(1, half)).version == 1
    finally:
        server.stop()


@pytest.mark.parametrize("path", ["org/model", "/no/such/folder"])
def test_a_server_whose_model_cannot_be_looked_at_is_not_updated(
    path: str, server: FakeSGLang, driver: SGLangServer, stage: Stage
) -> None:
    server.faults["/server_info"] = lambda: (200, {"model_path": path, "dtype": "auto"})
    with pytest.raises(UpdateRefusedError, match=f"started from '{path}': start it from the abs"):
        driver.update(1, stage(1, _full(1)))
    assert not server.paused


def test_a_version_that_is_not_staged_any_more_is_refused(
    server: FakeSGLang, driver: SGLangServer
) -> None:
    gone = StagedReference("trainsync-weights-0-0123456789abcdef/1.json", "sha256:" + "0" * 64)
    with pytest.raises(UpdateRefusedError, match="no weights are staged there"):
        driver.update(1, gone)
    assert server.tag == "default"
    assert not server.paused


def test_a_version_with_a_draft_model_is_refused(
    server: FakeSGLang, driver: SGLangServer, stage: Stage
) -> None:
    draft = {f"draft.{name}": tensor for name, tensor in _full(1).items()}
    with pytest.raises(UpdateRefusedError, match="of a draft model, which SGLang does not take"):
        driver.update(1, stage(1, {**_full(1), **draft}))
    assert not server.paused


def _fails(status: int, answer: Any) -> fake_sglang.Fault:
    return lambda: (status, answer)


@pytest.mark.parametrize("path", ["/ready", "/server_info", "/pause_generation"])
@pytest.mark.parametrize("status", [500, 404])
def test_a_server_that_fails_before_it_reads_the_version_serves_what_it_had(
    path: str, status: int, server: FakeSGLang, driver: SGLangServer, stage: Stage
) -> None:
    driver.update(1, stage(1, _full(1)))
    server.faults[path] = _fails(status, {"error": "out of order"})
    with pytest.raises(UpdateRefusedError, match=f"answered {status}"):
        driver.update(2, stage(2, _full(2)))
    server.faults.clear()
    assert _has(server, _full(1))
    assert driver.version() == 1
    assert not driver.is_paused()


def test_a_server_that_does_not_see_the_memory_serves_what_it_had(
    server: FakeSGLang, driver: SGLangServer, stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk, "lay_checkpoint", lambda *_: Path("/no/such/folder"))
    with pytest.raises(UpdateRefusedError, match="Cannot find any model weights"):
        driver.update(1, stage(1, _full(1)))
    assert not driver.is_paused()


@pytest.mark.parametrize(
    "message",
    [
        "Failed to update weights: a tensor is broken.\nRolling back to original weights.",
        "Weights were updated, but the cache was not flushed because requests are still running",
        "Failed to get weights iterator: gone | Succeeded to update model weights.",
    ],
)
def test_a_server_that_fails_while_it_reads_is_left_paused_and_mended_by_the_next_update(
    message: str, server: FakeSGLang, driver: SGLangServer, stage: Stage
) -> None:
    server.faults[_UPDATE] = _fails(400, {"success": False, "message": message})
    with pytest.raises(ServerPausedError, match="is left paused"):
        driver.update(1, stage(1, _full(1)))
    assert driver.is_paused()
    server.faults.clear()
    driver.update(2, stage(2, _full(2)))
    assert not driver.is_paused()
    assert _has(server, _full(2))


@pytest.mark.parametrize("answer", [(500, {"error": "?"}), (200, {"message": "?"}), (200, None)])
def test_an_update_that_does_not_say_success_is_none(
    answer: tuple[int, Any], server: FakeSGLang, driver: SGLangServer, stage: Stage
) -> None:
    server.faults[_UPDATE] = _fails(*answer)
    with pytest.raises(ServerPausedError, match="update_weights_from_disk"):
        driver.update(1, stage(1, _full(1)))
    assert driver.is_paused()


def test_a_paused_server_stays_paused_when_an_update_cannot_begin(
    server: FakeSGLang, driver: SGLangServer, stage: Stage
) -> None:
    server.paused = True
    with pytest.raises(ServerPausedError, match="more"):
        driver.update(1, stage(1, {**_full(1), "more": torch.zeros(1)}))
    server.faults["/pause_generation"] = _fails(500, {})
    with pytest.raises(ServerPausedError, match="left paused"):
        driver.update(1, stage(1, _full(1)))
    assert driver.is_paused()


def test_a_server_that_took_the_bytes_under_another_name_is_left_paused(
    server: FakeSGLang, driver: SGLangServer, stage: Stage
) -> None:
    server.faults["/model_info"] = _fails(200, {"weight_version": "6"})
    with pytest.raises(ServerPausedError, match="says that it has version 6, not 7"):
        driver.update(7, stage(7, _full(7)))
    assert driver.is_paused()


def test_a_server_that_does_not_resume_is_known_to_be_paused(
    server: FakeSGLang, driver: SGLangServer, stage: Stage
) -> None:
    server.faults["/continue_generation"] = _fails(500, {})
    with pytest.raises(ServerPausedError, match="did not resume"):
        driver.update(1, stage(1, _full(1)))
    assert driver.is_paused()


@pytest.mark.parametrize("path", ["/pause_generation", _UPDATE])
def test_a_server_that_hangs_is_given_up_in_time(
    path: str, server: FakeSGLang, memory: Path, stage: Stage
) -> None:
    over = threading.Event()

    def hang() -> None:
        if path == "/pause_generation":
            server.paused = True
        over.wait(60)

    server.faults[path] = hang
    # A server that hangs in pause holds the lock that resume waits for, too.
    server.faults["/continue_generation"] = hang
    started = time.monotonic()
    try:
        with (
            SGLangServer(server.url, timeout=2, resume_timeout=1, memory=memory) as driver,
            pytest.raises(ServerPausedError, match="did not answer within"),
        ):
            driver.update(1, stage(1, _full(1)))
        assert time.monotonic() - started < 30
        assert server.paused
    finally:
        over.set()


def test_an_answer_that_comes_slowly_but_in_time_is_waited_for(
    server: FakeSGLang, driver: SGLangServer, stage: Stage
) -> None:
    server.faults[_UPDATE] = lambda: time.sleep(1.0)
    assert driver.update(1, stage(1, _full(1))).pause_seconds >= 1.0


def test_a_server_that_is_killed_while_it_reads_is_told_of_and_its_successor_updated(
    model: Path, memory: Path, stage: Stage
) -> None:
    def run(*faults: str) -> tuple[subprocess.Popen[str], str]:
        process = subprocess.Popen(
            [sys.executable, fake_sglang.__file__, model, *faults],
            stdout=subprocess.PIPE,
            text=True,
        )
        assert process.stdout is not None
        return process, f"http://127.0.0.1:{int(process.stdout.readline())}"

    first, url = run(_UPDATE)
    errors: list[Exception] = []

    def update() -> None:
        try:
            with SGLangServer(url, timeout=60, memory=memory) as driver:
                driver.update(1, stage(1, _full(1)))
        except Exception as error:  # noqa: BLE001 - the test looks at it
            errors.append(error)

    thread = threading.Thread(target=update)
    try:
        thread.start()
        assert first.stdout is not None
        assert first.stdout.readline() == "hangs\n"
    finally:
        first.kill()
        first.wait()
    thread.join(60)
    assert [type(error) for error in errors] == [ServerPausedError]

    second, url = run()
    try:
        with SGLangServer(url, timeout=60, memory=memory) as driver:
            assert driver.tag() == "default"
            driver.update(1, stage(1, _full(1)))
            assert driver.version() == 1
    finally:
        second.kill()
        second.wait()


def test_log_probabilities_are_those_of_the_prompts_tokens_after_the_first(
    server: FakeSGLang, driver: SGLangServer
) -> None:
    prompts = [[3, number, 5] for number in range(40)]
    expected = [tuple(fake_sglang.sum_of(server.tensors, prompt)) for prompt in prompts]
    assert driver.logprobs(prompts) == tuple(expected)
    assert server.calls.count("/generate") == 3
    assert server.bodies["/generate"]["logprob_start_len"] == 0
    assert server.bodies["/generate"]["return_logprob"] is True


def test_the_last_token_of_the_vocabulary_may_be_named_as_the_first(
    server: FakeSGLang, driver: SGLangServer
) -> None:
    rows = [[None, 3, None], [-1.5, 0, None], [-2.5, 4, None]]
    answer = {"meta_info": {"input_token_logprobs": rows}}
    server.faults["/generate"] = _fails(200, [answer])
    assert driver.logprobs([[3, 127, 4]]) == ((-1.5, -2.5),)


@pytest.mark.parametrize(
    "rows",
    [
        [[None, 3, None], [None, 4, None]],
        [[None, 3, None]],
        [[None, 3, None], [-1.0, 5, None]],
        None,
    ],
)
def test_an_answer_without_the_log_probabilities_of_the_prompt_is_an_error(
    rows: Any, server: FakeSGLang, driver: SGLangServer
) -> None:
    answer = {"meta_info": {"input_token_logprobs": rows}}
    server.faults["/generate"] = _fails(200, [answer])
    with pytest.raises(ServerError, match="no log-probabilities"):
        driver.logprobs([[3, 4]])


def test_checksums_are_told_by_rank_and_name(server: FakeSGLang, driver: SGLangServer) -> None:
    found = driver.checksums()
    assert set(found) == {f"target:dp0:pp0:tp0:{name}" for name in server.tensors}
    server.faults["/weights_checker"] = _fails(200, {"success": True})
    with pytest.raises(ServerError, match="no checksums"):
        driver.checksums()


@pytest.mark.parametrize("answer", [{"weight_version": None}, {}, []])
def test_a_server_without_a_weight_version_is_told_of(
    answer: Any, server: FakeSGLang, driver: SGLangServer
) -> None:
    server.faults["/model_info"] = _fails(200, answer)
    with pytest.raises(ServerError):
        driver.tag()


def test_a_server_that_starts_is_not_updated(
    server: FakeSGLang, driver: SGLangServer, stage: Stage
) -> None:
    server.starting = True
    with pytest.raises(ServerError, match="starts, ends or is unhealthy"):
        driver.is_paused()
    with pytest.raises(UpdateRefusedError, match="starts, ends or is unhealthy"):
        driver.update(1, stage(1, _full(1)))
    assert not server.paused
    server.starting = False
    driver.update(1, stage(1, _full(1)))
    assert _has(server, _full(1))


def test_a_server_without_the_endpoint_that_tells_of_a_pause_is_told_of(
    server: FakeSGLang, driver: SGLangServer
) -> None:
    server.faults["/ready"] = _fails(404, {"detail": "Not Found"})
    with pytest.raises(ServerError, match="/ready answered 404, not 200 or 503"):
        driver.is_paused()
