"""A staged version reaches a reader unchanged; a bad one is refused in one sentence."""

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from trainsync.storage.digest import manifest_digest
from trainsync.weights.errors import DigestMismatchError, SharedMemoryError
from trainsync.weights.staging.area import StagingArea
from trainsync.weights.staging.index import StagedReference
from trainsync.weights.staging.reading import StagedReader
from trainsync.weights.transports.shared_memory.segment import SegmentGoneError

from tests.unit.engines.inference.tensors import every_kind, raw

_WEIGHTS = {"a": torch.arange(10, dtype=torch.bfloat16), "b": torch.ones(3, 5)}


@pytest.fixture
def area(tmp_path: Path) -> Iterator[StagingArea]:
    made = StagingArea(tmp_path)
    yield made
    made.close()


def test_a_reader_gets_every_tensor_as_it_was(area: StagingArea, tmp_path: Path) -> None:
    named = every_kind()
    staged = StagedReader(tmp_path).open(area.stage(7, dict(named)))
    assert staged.index.weight_version == 7
    assert raw(list(staged.tensors.items())) == raw(named)
    staged.check()


def test_memory_that_is_read_takes_no_other_version(area: StagingArea, tmp_path: Path) -> None:
    held = StagedReader(tmp_path).open(area.stage(1, _WEIGHTS))
    for version in range(2, 6):
        area.stage(version, {name: tensor + version for name, tensor in _WEIGHTS.items()})
    assert torch.equal(held.tensors["b"], _WEIGHTS["b"])
    held.check()


def test_versions_that_nobody_reads_take_the_memory_of_one(
    area: StagingArea, tmp_path: Path
) -> None:
    reader = StagedReader(tmp_path)
    for version in range(5):
        assert reader.open(area.stage(version, _WEIGHTS)).index.weight_version == version
    (folder,) = tmp_path.iterdir()
    assert len(list(folder.iterdir())) == 3  # a segment, its index, the probe


def test_a_version_that_is_read_keeps_its_index(area: StagingArea, tmp_path: Path) -> None:
    first = area.stage(1, _WEIGHTS)
    held = StagedReader(tmp_path).open(first)
    area.stage(2, _WEIGHTS)
    assert StagedReader(tmp_path).open(first).index == held.index


def test_an_older_version_is_gone(area: StagingArea, tmp_path: Path) -> None:
    first = area.stage(1, _WEIGHTS)
    area.stage(2, _WEIGHTS)
    with pytest.raises(SegmentGoneError, match="no weights are staged there"):
        StagedReader(tmp_path).open(first)


def test_nothing_is_left_of_a_closed_area(tmp_path: Path) -> None:
    area = StagingArea(tmp_path)
    reference = area.stage(1, _WEIGHTS)
    area.close()
    assert not list(tmp_path.iterdir())
    with pytest.raises(SegmentGoneError):
        StagedReader(tmp_path).open(reference)


def test_bytes_other_than_promised_are_not_announced(area: StagingArea, tmp_path: Path) -> None:
    good = StagedReader(tmp_path).open(area.stage(1, _WEIGHTS)).index.digest
    area.stage(2, _WEIGHTS, good)
    with pytest.raises(DigestMismatchError, match=r"version 3 has digest .*, expected"):
        area.stage(3, {**_WEIGHTS, "b": torch.zeros(3, 5)}, good)


def test_changed_bytes_are_found(area: StagingArea, tmp_path: Path) -> None:
    reference = area.stage(1, _WEIGHTS)
    segment = tmp_path / reference.index.removesuffix(".json")
    data = bytearray(segment.read_bytes())
    data[3] ^= 1
    with segment.open("r+b") as file:
        file.write(data)
    with pytest.raises(DigestMismatchError, match="version 1 has digest"):
        StagedReader(tmp_path).open(reference).check()


@pytest.mark.parametrize(
    "index",
    [
        "",
        "../etc/passwd",
        "/etc/passwd.json",
        "trainsync-weights-0-0123456789abcdef/../../x.json",
        "trainsync-weights-0-0123456789abcdef/1.json.json",
        "trainsync-weights-0-0123456789abcdef/probe.json",
    ],
)
def test_a_reference_to_anything_else_is_refused(index: str, tmp_path: Path) -> None:
    with pytest.raises(SharedMemoryError):
        StagedReader(tmp_path).open(StagedReference(index, f"sha256:{'0' * 64}"))


def test_an_index_of_another_version_is_refused(area: StagingArea, tmp_path: Path) -> None:
    reference = area.stage(1, _WEIGHTS)
    path = tmp_path / reference.index
    path.write_bytes(path.read_bytes().replace(b'"weightVersion": 1', b'"weightVersion": 2'))
    if manifest_digest(path.read_bytes()) == reference.digest:
        pytest.fail("the index was not changed")
    with pytest.raises(DigestMismatchError, match=r"expected sha256:"):
        StagedReader(tmp_path).open(reference)


def test_a_reference_says_what_each_host_of_an_engine_has() -> None:
    one = StagedReference("one/1.json", "sha256:1")
    other = StagedReference("other/7.json", "sha256:2")
    both = replace(one, hosts=(other,))
    assert [both.on_host(rank) for rank in (0, 1, 2)] == [one, other, None]
    assert StagedReference.told(json.loads(json.dumps(both.as_dict()))) == both
    assert StagedReference.told(one.as_dict()) == one
    assert "hosts" not in one.as_dict(), "an engine of an older release knows of none"


def _torn(data: bytes) -> bytes:
    return data[: len(data) // 2]


def _with(**fields: object) -> Callable[[bytes], bytes]:
    return lambda data: json.dumps({**json.loads(data), **fields}).encode()


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (_torn, "is no index"),
        (_with(version=2), "is no index"),
        (_with(bytes=1), "contradicts itself"),
        (_with(segment="trainsync-weights-0-0123456789abcdef/9"), "contradicts itself"),
        (_with(tensors=[["a", "float32", 4, [2]], ["a", "float32", 4, [2]]]), "contradicts"),
        (_with(tensors=[["a", "float32", 4, [1 << 20]]], bytes=4 << 20), "bytes, expected"),
        (_with(tensors=[["a", "float32", 4, [-1]]]), "is no index"),
    ],
)
def test_an_index_that_lies_is_refused(
    damage: Callable[[bytes], bytes], message: str, area: StagingArea, tmp_path: Path
) -> None:
    reference = area.stage(1, _WEIGHTS)
    path = tmp_path / reference.index
    path.write_bytes(damage(path.read_bytes()))
    reference = replace(reference, digest=manifest_digest(path.read_bytes()))
    with pytest.raises(SharedMemoryError, match=message):
        StagedReader(tmp_path).open(reference)


def test_a_file_system_without_room_says_so(tmp_path: Path) -> None:
    with pytest.raises(SharedMemoryError, match="cannot be used"):
        StagingArea(tmp_path / "missing")
