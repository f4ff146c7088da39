"""The compiled loops say of every block what a few lines of numpy say."""

import importlib.util
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from trainsync.weights.delta import codec, compiling
from trainsync.weights.delta.codec import Block, Bytes, apply_record, encode_block, join, split
from trainsync.weights.errors import DeltaError

WORDS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
AROUND = 100  # bytes before and after, which must not change


def record_of(base: Bytes, new: Bytes, block: Block) -> bytes | None:
    """The record by numpy."""
    word: Any = WORDS[block.width]
    old, fresh = base.copy().view(word), new.copy().view(word)
    places = np.flatnonzero(old != fresh)
    if not places.size:
        return None
    changes = np.bincount(places >> 16, minlength=-(-old.size // 65536))
    return b"".join(
        (
            codec._RECORD.pack(block.start, base.size, block.width, places.size),
            changes.astype("<u4").tobytes(),
            (places & 0xFFFF).astype("<u2").tobytes(),
            fresh[places].tobytes(),
        )
    )


def within(data: Bytes, offset: int) -> tuple[Bytes, Bytes]:
    """A copy of ``data`` at some address, and the memory that it lies in."""
    memory = np.full(AROUND + offset + data.size + AROUND, 0xA5, np.uint8)
    inner = memory[AROUND + offset : AROUND + offset + data.size]
    inner[:] = data
    return inner, memory


def check(base: Bytes, new: Bytes, width: int, offsets: tuple[int, int, int] = (0, 0, 0)) -> None:
    block = Block(0, base.size, width)
    (mine, kept), (fresh, source) = within(base, offsets[0]), within(new, offsets[1])
    before = source.tobytes()
    fresh.flags.writeable = False
    found = encode_block(mine, fresh, block)
    assert (None if found is None else found.tobytes()) == record_of(base, new, block)
    assert kept.tobytes() == within(new, offsets[0])[1].tobytes()
    assert source.tobytes() == before
    target, around = within(base, offsets[2])
    if found is not None:
        whole = np.frombuffer(join([found], base.size).tobytes(), np.uint8)  # read-only, as in Ray
        for record in split(whole, base.size):
            apply_record(record, target)
    assert around.tobytes() == within(new, offsets[2])[1].tobytes()


@given(
    width=st.sampled_from([1, 2, 4, 8]),
    elements=st.integers(0, 400),
    share=st.sampled_from([0.0, 0.01, 0.3, 1.0]),
    offsets=st.tuples(st.integers(0, 9), st.integers(0, 9), st.integers(0, 9)),
    seed=st.integers(0, 1 << 16),
)
def test_records_are_those_of_numpy_wherever_the_bytes_lie(
    width: int, elements: int, share: float, offsets: tuple[int, int, int], seed: int
) -> None:
    generator = np.random.default_rng(seed)
    base = generator.integers(0, 256, elements * width, dtype=np.uint8)
    new = base.copy()
    hit = generator.random(elements) < share
    byte = generator.integers(0, width, elements)  # any one of an element's bytes
    new.reshape(-1, width)[hit, byte[hit]] ^= np.uint8(1 << seed % 8)
    check(base, new, width, offsets)


@pytest.mark.parametrize("width", [1, 2, 4, 8])
def test_a_change_of_any_one_bit_of_two_lines_and_a_tail_is_found(width: int) -> None:
    base = np.random.default_rng(0).integers(0, 256, 2 * 64 + 24, dtype=np.uint8)
    for bit in range(8 * base.size):
        new = base.copy()
        new[bit >> 3] ^= 1 << (bit & 7)
        check(base, new, width)


@pytest.mark.parametrize("width", [1, 2, 4, 8])
@pytest.mark.parametrize("elements", [65535, 65536, 65537, 131_072 + 3])
def test_pages_are_counted_each(width: int, elements: int) -> None:
    base = np.random.default_rng(1).integers(0, 256, elements * width, dtype=np.uint8)
    new = base.copy()
    changed = new.reshape(-1, width)
    for place in {0, 31, 65535 % elements, 65536 % elements, elements - 1}:
        changed[place] += 1
    check(base, new, width)
    check(base, ~base, width)


def test_a_place_just_behind_the_block_is_refused_and_nothing_is_written() -> None:
    for elements in (1, 31, 65536, 65537):
        base = np.zeros(2 * elements, np.uint8)
        new = base.copy()
        new.view(np.uint16)[[0, -1]] = 7
        record = encode_block(base.copy(), new, Block(0, base.size, 2))
        assert record is not None
        shorter = base.size - 2
        codec._RECORD.pack_into(
            record.data, 0, 0, shorter, 2, *codec._RECORD.unpack_from(record.data)[3:]
        )
        target = np.zeros(shorter, np.uint8)
        with pytest.raises(DeltaError):
            for found in split(join([record], shorter), shorter):
                apply_record(found, target)
        assert not target.any()


def test_without_deltas_nothing_is_compiled() -> None:
    """Importing numba and compiling take seconds, and every weight transfer imports this module."""
    code = "import sys, trainsync.weights.delta.codec; sys.exit('numba' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


@pytest.mark.parametrize(
    "user", ["delta.base:DeltaBase", "transports.object_store.upload_delta:UploadBase"]
)
def test_deltas_without_numba_are_refused_with_the_reason(
    user: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, name = user.split(":")
    make: Callable[..., object] = getattr(
        importlib.import_module(f"trainsync.weights.{module}"), name
    )
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(DeltaError, match="numba, which is not installed"):
        make(*([1024] if name == "DeltaBase" else []))


@pytest.fixture
def anew(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """As in a process that has compiled nothing yet."""
    caches = (compiling._compiling, compiling._kernel_of)
    for cache in caches:
        cache.cache_clear()
    yield monkeypatch
    for cache in caches:
        cache.cache_clear()


@pytest.fixture
def ready(anew: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Compiling has begun, and ends with this."""
    import_kernel, ready = compiling._import_kernel, threading.Event()

    def slow() -> object:
        assert ready.wait(60)
        return import_kernel()

    anew.setattr(compiling, "_import_kernel", slow)
    assert not compiling.prepare()
    yield ready
    ready.set()
    assert compiling.prepare(60)


def in_child(check: Callable[[], bool]) -> int:
    """The exit status of a forked process: 0 if ``check`` holds in it."""
    child = os.fork()
    if child == 0:
        signal.alarm(20)
        status = 1
        try:
            status = 0 if check() else 2
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def finds_a_change() -> bool:
    return encode_block(np.zeros(8, np.uint8), np.ones(8, np.uint8), Block(0, 8, 1)) is not None


def refused() -> bool:
    for use in (compiling.prepare, finds_a_change):
        with pytest.raises(DeltaError, match="forked while its parent compiled"):
            use()
    return True


def test_a_process_is_forked_when_the_loops_are_compiled_and_has_them(
    ready: threading.Event,
) -> None:
    timer = threading.Timer(0.1, ready.set)
    timer.start()
    assert in_child(lambda: compiling.prepare() and finds_a_change()) == 0
    timer.join()


def test_a_process_that_is_forked_while_they_compile_for_long_refuses_deltas_and_never_hangs(
    ready: threading.Event, anew: pytest.MonkeyPatch
) -> None:
    anew.setattr(compiling, "_FORK_SECONDS", 0.0)
    assert in_child(refused) == 0


def test_loops_that_cannot_be_compiled_are_an_error_of_deltas_each_time(
    anew: pytest.MonkeyPatch,
) -> None:
    def fail() -> object:
        raise ImportError("no llvmlite")

    anew.setattr(compiling, "_import_kernel", fail)
    for use in (lambda: compiling.prepare(60), compiling.prepare, finds_a_change):
        with pytest.raises(DeltaError, match="fails here: ImportError: no llvmlite"):
            use()
