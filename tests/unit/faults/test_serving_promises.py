"""The server trials can fail: each promise that is broken is noticed."""

import json
import multiprocessing
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from trainsync.engines.servers.errors import ServerError
from trainsync.engines.servers.vllm import VLLMServer
from trainsync.storage.layout import RunDirectory
from trainsync.weights.staging.area import StagingArea
from trainsync.weights.staging.reading import StagedReader

from tests.faults.processes import BrokenError, Child
from tests.faults.serving import chain, promises
from tests.faults.serving.actors import Strike
from tests.faults.serving.model import (
    FIRST_HALF,
    START,
    Variant,
    begin,
    logprobs,
    prompt_logprobs,
    read,
    tensors_of,
    weights_of,
)
from tests.faults.serving.promises import Times
from tests.faults.serving.server import (
    LOADING,
    START_TAG,
    Fault,
    How,
    Log,
    Server,
    read_log,
    serving,
)
from tests.ports import port_of, reserved_port
from tests.waiting import eventually

ONE, TWO, AGAIN = (0, 1), (0, 2), (1, 2)
BEGUN = (ONE, TWO, AGAIN)
TAGS = {ONE: f"1-{'a' * 16}", TWO: f"2-{'b' * 16}", AGAIN: f"2-{'c' * 16}", START: START_TAG}


def answered(
    *makers: Variant,
    said: Variant | None = None,
    before: Variant = ONE,
    after: Variant | None = ONE,
    attempts: tuple[int, int] = (0, 0),
) -> dict[str, Any]:
    """A record of an answer, each of whose tokens is made by other weights.

    Args:
        said: whose name the tokens bear; None: of those that made them.
    """
    tokens, rows = [3, 5], []
    for maker in makers:
        weights, state = weights_of(maker), begin()
        for token in tokens:
            state = read(weights, state, token)
        found = logprobs(weights, state)
        tokens.append(int(found.argmax()))
        rows.append([tokens[-1], float(found.max()), TAGS[said or maker]])
    return {
        "status": 200,
        "prompt": [3, 5],
        "tokens": rows,
        "before": [TAGS[before], TAGS[before], attempts[0]],
        "after": None if after is None else [TAGS[after], TAGS[after], attempts[1]],
    }


def test_right_answers_count_as_long_as_the_server_was_ready_before_and_after() -> None:
    records = [
        answered(ONE, ONE),
        answered(ONE, TWO, after=TWO),  # a request that went on through an update
        answered(ONE, after=None),
        answered(ONE, TWO, ONE, attempts=(0, 1)),  # the next attempt began with the same weights
        answered(AGAIN, before=AGAIN, after=AGAIN),
    ]
    assert promises.check_answers(records, BEGUN) == [1, 2]


@pytest.mark.parametrize(
    ("record", "said"),
    [
        (answered(ONE, TWO, ONE, said=ONE), "is not of its weights"),
        (answered(ONE, TWO, said=ONE, after=None), "is not of its weights"),
        (answered(START, said=ONE), "is not of its weights"),
        (answered(ONE, TWO), "is proven"),
        (answered(ONE, TWO, ONE), "is proven"),
        (answered(START, before=START, after=START), "no trainer made"),
        (
            {**answered(ONE), "before": [TAGS[ONE], None, 0], "after": [TAGS[ONE], None, 0]},
            "is proven",
        ),
        ({**answered(ONE), "status": 500}, "answered 500"),
    ],
    ids=["mixed", "mixed-in-passing", "stale", "other", "and-back", "start", "unproven", "fails"],
)
def test_a_wrong_answer_is_noticed(record: dict[str, Any], said: str) -> None:
    with pytest.raises(BrokenError, match=said):
        promises.check_answers([answered(ONE), record], BEGUN)


def test_one_name_is_of_one_version_in_all_answers() -> None:
    both = [answered(TWO), answered(AGAIN, said=TWO)]
    both = [{**record, "after": None} for record in both]
    assert promises.check_answers(both[:1], BEGUN) == []
    with pytest.raises(BrokenError, match="is not of its weights"):
        promises.check_answers(both, BEGUN)


def test_of_a_server_that_lies_only_what_counts_is_checked() -> None:
    passing = answered(TWO, said=ONE, after=None)
    assert promises.check_answers([passing, answered(ONE)], BEGUN, lies=True) == [1]
    with pytest.raises(BrokenError, match="is not of its weights"):
        promises.check_answers([answered(TWO, said=ONE)], BEGUN, lies=True)


def events(*named: tuple[str, float]) -> list[dict[str, Any]]:
    return [{"event": name, "at": at} for name, at in named]


def test_a_long_pause_is_noticed_but_for_what_is_excused() -> None:
    short = events(("paused", 1), ("resumed", 2), ("paused", 3), ("started", 4), ("resumed", 9))
    assert promises.check_pauses(short, 10, 1.5) == 1
    for long in (events(("paused", 1), ("paused", 3), ("resumed", 4)), events(("paused", 1))):
        with pytest.raises(BrokenError, match=r"paused for 3\.00 s"):
            promises.check_pauses(long, 4, 2)
        assert promises.check_pauses(long, 4, 2, [Times(0, 1.5), Times(2, 3)]) == 1.5


def test_what_is_left_is_noticed(tmp_path: Path) -> None:
    promises.check_memory(tmp_path)
    promises.check_temporaries(tmp_path)
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / ".file.0123.tmp").touch()
    with pytest.raises(BrokenError, match="left in shared memory"):
        promises.check_memory(tmp_path)
    with pytest.raises(BrokenError, match="left in the run's directory"):
        promises.check_temporaries(tmp_path)


def test_a_process_that_is_left_is_noticed() -> None:
    before = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    known = {int(child) for child in before}
    left = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,))
    left.start()
    try:
        assert left.pid is not None
        promises.check_children(os.getpid(), {*known, left.pid})
        with pytest.raises(BrokenError, match=str(left.pid)):
            promises.check_children(os.getpid(), known)
    finally:
        left.kill()
        left.join()


def test_segments_that_a_server_keeps_mapped_are_noticed(tmp_path: Path) -> None:
    areas = [StagingArea(tmp_path) for _ in range(3)]
    kept = []
    for area in areas:
        promises.check_mapped(os.getpid(), tmp_path)
        kept.append(StagedReader(tmp_path).open(area.stage(1, tensors_of(ONE))))
    with pytest.raises(BrokenError, match="3 segments mapped"):
        promises.check_mapped(os.getpid(), tmp_path)
    del kept
    for area in areas:
        area.close()


class Driven:
    """A server of the trials, in this process, with a driver and a long request."""

    def __init__(self, folder: Path) -> None:
        self.memory = folder / "memory"
        self.memory.mkdir()
        self._bound = reserved_port()
        self.url = f"http://127.0.0.1:{port_of(self._bound)}"
        self.server = Server(port_of(self._bound), self.memory, Log(folder / "log"), None)
        self.log = folder / "log"
        self._answers: list[dict[str, Any]] = []

    def ask_through(self, driver: VLLMServer, area: StagingArea) -> dict[str, Any]:
        """The record of an answer during whose time the server gets version 2."""

        def ask() -> None:
            body = {"prompt": [3, 5], "count": 40, "seconds": 4.0}
            said = httpx.post(f"{self.url}/generate", json=body, timeout=60, trust_env=False)
            self._answers.append(said.json())

        driver.update(1, area.stage(1, tensors_of(ONE)), TAGS[ONE])
        staged = area.stage(2, tensors_of(TWO))
        asking = threading.Thread(target=ask)
        asking.start()
        eventually(lambda: self.server.made > 0, 60)
        driver.update(2, staged, TAGS[TWO])
        asking.join(60)
        record = answered(ONE, after=TWO) | {"tokens": self._answers[0]["tokens"]}
        assert {tag for _, _, tag in record["tokens"]} == {TAGS[ONE], TAGS[TWO]}
        return record

    @property
    def is_paused(self) -> bool:
        answer = httpx.get(f"{self.url}/is_paused", timeout=60, trust_env=False)
        return bool(answer.json()["is_paused"])

    def close(self) -> None:
        self._bound.close()


@pytest.fixture
def driven(tmp_path: Path) -> Iterator[Driven]:
    made = Driven(tmp_path)
    yield made
    made.close()


@pytest.mark.parametrize("forgotten", [None, "/pause?mode=keep", "/reset_prefix_cache"])
def test_a_driver_that_forgets_a_call_gives_mixed_answers_which_are_noticed(
    forgotten: str | None, driven: Driven, monkeypatch: pytest.MonkeyPatch
) -> None:
    with VLLMServer(driven.url, timeout=60) as driver:
        ask = driver._calls.ask

        def forgets(method: str, path: str, *more: Any) -> dict[str, Any]:
            if forgotten is not None and path.startswith(forgotten):
                return {"success": True}
            answer, made = ask(method, path, *more), driven.server.made
            if path == LOADING and made and not driven.is_paused:
                eventually(lambda: driven.server.made > made, 60)
            return answer

        area = StagingArea(driven.memory)
        monkeypatch.setattr(driver._calls, "ask", forgets)
        try:
            record = driven.ask_through(driver, area)
        finally:
            area.close()
    assert json.loads(json.dumps(record)) == record
    assert [e["tag"] for e in read_log(driven.log) if e["event"] == "named"] == [
        TAGS[ONE],
        TAGS[TWO],
    ]
    if forgotten is None:
        assert promises.check_answers([record], BEGUN) == []
        return
    with pytest.raises(BrokenError, match="is not of its weights"):
        promises.check_answers([record], BEGUN)


def test_what_a_killed_reader_left_is_the_monitors_to_remove(tmp_path: Path) -> None:
    leases = RunDirectory(tmp_path).leases
    leases.mkdir(parents=True)
    left = leases / ".state_dict-2-agent-6e308b7b.json.2d1e8952.tmp"
    left.touch()
    promises.check_temporaries(tmp_path)
    assert not left.exists()


def test_errors_of_a_server_are_excused_only_while_it_dies() -> None:
    failed = {**answered(ONE), "status": 500, "tokens": [], "at": 5.0}
    assert promises.check_answers([failed, answered(ONE)], BEGUN, broken=[Times(4, 6)]) == [1]
    for elsewhere in ([], [Times(6, 7)]):
        with pytest.raises(BrokenError, match="answered 500"):
            promises.check_answers([failed], BEGUN, broken=elsewhere)


def test_halves_of_two_versions_are_noticed() -> None:
    weights = weights_of(TWO) | {name: weights_of(ONE)[name] for name in FIRST_HALF}
    state = begin()
    for token in (3, 5):
        state = read(weights, state, token)
    found = logprobs(weights, state)
    row = [int(found.argmax()), float(found.max()), TAGS[TWO]]
    mixed = {**answered(TWO, before=TWO, after=TWO), "tokens": [row]}
    with pytest.raises(BrokenError, match="is not of its weights"):
        promises.check_answers([mixed], BEGUN)


@pytest.fixture
def of_workers(tmp_path: Path) -> Iterator[tuple[Child, list[int], str, Path]]:
    """A server of two workers, its workers, its URL, and the memory."""
    memory = tmp_path / "memory"
    memory.mkdir()
    with reserved_port() as bound:
        port = port_of(bound)
        fault = Fault(LOADING, How.KILLED, 1, worker=1)
        child = Child("server", serving, port, memory, tmp_path / "log", fault, True)
        try:
            yield child, child.expect("listening"), f"http://127.0.0.1:{port}", memory
        finally:
            child.kill()


def test_a_server_of_two_workers_answers_with_the_weights_of_both_until_one_dies(
    of_workers: tuple[Child, list[int], str, Path],
) -> None:
    server, workers, url, memory = of_workers
    assert len(workers) == 2
    area = StagingArea(memory)
    try:
        with VLLMServer(url, timeout=60) as driver:
            driver.update(1, area.stage(1, tensors_of(ONE)), TAGS[ONE])
            body = {"prompt": [3, 5], "count": 3, "seconds": 0.0}
            said = httpx.post(f"{url}/generate", json=body, timeout=60, trust_env=False)
            record = {**answered(ONE), "tokens": said.json()["tokens"]}
            assert promises.check_answers([record], BEGUN) == [1]
            canaries = [[3, 5, 7], [1, 2, 3]]
            wanted = [prompt_logprobs(weights_of(ONE), prompt) for prompt in canaries]
            for row, expected in zip(driver.logprobs(canaries), wanted, strict=True):
                assert row == pytest.approx(expected, abs=1e-6)
            server.tell("arm")
            server.expect("armed")
            with pytest.raises(ServerError):
                driver.update(2, area.stage(2, tensors_of(TWO)), TAGS[TWO])
            assert server.wait() == 1
            assert not any(Path(f"/proc/{pid}").exists() for pid in workers)
    finally:
        area.close()


class _Cable:
    """In place of a `Space`."""

    def __init__(self) -> None:
        self.is_cut = False

    def cut(self) -> None:
        self.is_cut = True


def test_a_strike_leaves_its_mark_and_unplugs_the_cable(tmp_path: Path) -> None:
    cable: Any = _Cable()
    Strike("fellows", "passing", cuts=cable, mark=tmp_path / "struck").strike()
    assert cable.is_cut
    assert (tmp_path / "struck").exists()


class _NeverPasses:
    """In place of a `Scene` whose agent takes all versions from the volume."""

    from_fellows = 7.0

    def __init__(self) -> None:
        self.published: list[int] = []

    def publish(self, step: int) -> None:
        self.published.append(step)

    def until_served(self, step: int) -> None:
        assert step == self.published[-1]


def test_a_chain_that_passes_nothing_on_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chain, "NEWEST_SECONDS", 0.05)
    scene: Any = _NeverPasses()
    with pytest.raises(BrokenError, match="no version is passed on"):
        chain.Chain(scene, []).until_passed_on()
    assert scene.published
