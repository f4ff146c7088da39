"""The digest that a GPU takes itself: one value for equal bytes, wherever and however they lie."""

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from trainsync.weights.buckets import device_digest as module
from trainsync.weights.buckets.device_digest import DeviceDigest, held_to, is_of_device
from trainsync.weights.buckets.tensor_part import TensorPart
from trainsync.weights.errors import InconsistentUploadError

DTYPES = (torch.bfloat16, torch.float8_e4m3fn, torch.float32, torch.int64, torch.bool, torch.uint8)
CHUNK = 64

contents = st.lists(st.binary(max_size=5 * CHUNK), min_size=1, max_size=4)


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(module, "_CHUNK_BYTES", CHUNK)
    module._keys.cache_clear()
    yield
    module._keys.cache_clear()


def tensor(data: bytes) -> torch.Tensor:
    return torch.from_numpy(np.frombuffer(data, dtype=np.uint8).copy())


def digest(tensors: list[torch.Tensor]) -> str:
    taken = DeviceDigest()
    for one in tensors:
        taken.update(one)
    return taken.result()


def nh_by_hand(data: bytes) -> list[int]:
    """Both rounds of a chunk, with Python's own numbers."""
    padded = data + bytes(-len(data) % 8)
    words = np.frombuffer(padded, dtype="<i4").tolist()
    keys = module._keys(torch.device("cpu")).tolist()

    def signed(number: int, bits: int) -> int:
        number %= 1 << bits
        return number - (1 << bits) if number >> (bits - 1) else number

    def one_round(start: int) -> int:
        mixed = [signed(word + keys[start + i], 32) for i, word in enumerate(words)]
        return signed(sum(a * b for a, b in zip(mixed[::2], mixed[1::2], strict=True)), 64)

    return [one_round(0), one_round(2)]


def test_a_tensor_in_parts_of_whole_chunks_has_the_digest_of_the_whole() -> None:
    whole = torch.randn(5 * CHUNK + 3).bfloat16()
    taken = DeviceDigest()
    for start in range(0, whole.numel(), CHUNK):
        taken.update(TensorPart(tuple(whole.shape), start, whole[start : start + CHUNK]))
    assert taken.result() == digest([whole])


@given(st.binary(min_size=1, max_size=CHUNK))
def test_a_chunk_has_the_value_that_nh_gives_it(data: bytes) -> None:
    assert module._nh(tensor(data)).tolist() == nh_by_hand(data)


@given(contents, st.data())
def test_a_changed_bit_anywhere_changes_it(parts: list[bytes], data: st.DataObject) -> None:
    tensors = [tensor(part) for part in parts]
    before = digest(tensors)
    assert before == digest(tensors)
    whole = [one for one in tensors if one.numel()]
    if whole:
        changed = data.draw(st.sampled_from(range(len(whole))))
        place = data.draw(st.integers(0, whole[changed].numel() - 1))
        whole[changed][place] ^= 1 << data.draw(st.integers(0, 7))
        assert digest(tensors) != before


@given(st.binary(min_size=16, max_size=4 * CHUNK), st.data())
def test_two_words_that_change_places_change_it(content: bytes, data: st.DataObject) -> None:
    words = np.frombuffer(content[: len(content) // 4 * 4], dtype="<u4").copy()
    first, second = data.draw(st.permutations(range(len(words))))[:2]
    other = words.copy()
    other[[first, second]] = other[[second, first]]
    same = (other == words).all()
    assert (digest([tensor(words.tobytes())]) == digest([tensor(other.tobytes())])) == same


def test_two_signs_that_change_do_not_cancel_out() -> None:
    before = torch.ones(64, dtype=torch.bfloat16)
    after = before.clone()
    after[3], after[7] = -1, -1  # the highest bits of two lanes
    assert digest([before]) != digest([after])


def test_tensors_of_other_sizes_have_another_one_though_their_bytes_are_the_same() -> None:
    assert len({digest([tensor(bytes(n))]) for n in range(20)}) == 20
    assert digest([tensor(b"ab"), tensor(b"c")]) != digest([tensor(b"a"), tensor(b"bc")])


@settings(max_examples=30)
@given(st.sampled_from(DTYPES), st.integers(0, 100), st.integers(0, 9))
def test_it_is_of_the_bytes_whatever_their_type_and_place(
    dtype: torch.dtype, count: int, offset: int
) -> None:
    size = count * dtype.itemsize
    data = torch.randint(0, 2, (offset * dtype.itemsize + size,), dtype=torch.uint8)
    there = data[offset * dtype.itemsize :]
    plain = digest([there.clone()])
    assert digest([there]) == plain
    assert digest([data.view(dtype)[offset:]]) == plain


def test_a_transposed_tensor_counts_row_by_row() -> None:
    matrix = torch.arange(35, dtype=torch.int32).reshape(5, 7)
    assert digest([matrix.T]) == digest([matrix.T.contiguous()]) != digest([matrix])


def test_tensors_are_the_same_still_or_their_end_is_an_error() -> None:
    weights = [("a", torch.arange(9)), ("b", torch.zeros(0))]
    taken = DeviceDigest()
    assert list(taken.over(weights)) == weights
    known = taken.result()
    assert is_of_device(known) and not is_of_device("xxh3-128:00") and not is_of_device(None)
    assert [name for name, _ in held_to(lambda: weights, known)()] == ["a", "b"]
    weights[0][1][3] += 1
    again = iter(held_to(lambda: weights, known)())
    next(again), next(again)
    with pytest.raises(InconsistentUploadError, match="when they were sent before"):
        next(again)


def test_a_gather_begins_before_the_first_tensor_is_asked_for() -> None:
    begun = []

    def tensors() -> list[tuple[str, torch.Tensor]]:
        begun.append(1)
        return []

    held_to(tensors, "nh-128:0")()
    assert begun
