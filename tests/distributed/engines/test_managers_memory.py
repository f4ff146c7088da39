"""A rank of a verl engine is killed, and checkpoint managers load from the memory of pods."""

import pickle
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from trainsync.api.protocol import LoadReport

from tests.distributed.engines import managers_memory
from tests.distributed.engines.managers_memory import FOLDER, VICTIM, Fsdp2, Kind, Megatron
from tests.distributed.ranks import run_ranks, values_of

pytest.importorskip("verl", reason="the extra `verl` is not installed")

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(400)]

PARTS = ("model", "optim", "extra_state")


@dataclass(frozen=True)
class Story:
    """A run whose rank 1 was killed.

    Attributes:
        ranks: what `managers_memory.resume` returned, by rank.
        went_on: how each rank went on before the kill.
        sizes: bytes of shard files, by part and rank.
        others: bytes of rank 0's files that rank 1 reads, too: Megatron's weights that all tensor
            parallel ranks have alike, and their optimizer's state, are saved by the first.
    """

    ranks: list[dict[str, Any]]
    went_on: list[dict[str, Any]]
    sizes: dict[tuple[str, int], int]
    others: int

    def told(self, name: str) -> LoadReport:
        (report,) = self.ranks[0][name]["told"]
        assert isinstance(report, LoadReport)
        return report

    @property
    def read(self) -> int:
        """Bytes of files that the ranks read in the layout that saved."""
        return sum(self.sizes.values()) + self.others


def story(directory: Path, kind: Kind) -> Story:
    _, victim = run_ranks(managers_memory.save_and_be_killed, directory, kind, seconds=180)
    assert victim.exit_code == -signal.SIGKILL, victim.error
    sizes = {
        (part, rank): (directory / FOLDER / f"{part}_world_size_2_rank_{rank}.pt").stat().st_size
        for part in PARTS
        for rank in (0, 1)
    }
    went_on = [
        pickle.loads(managers_memory.went_on(directory, rank).read_bytes()) for rank in (0, 1)
    ]
    ranks = values_of(run_ranks(managers_memory.resume, directory, kind, seconds=180))
    others = sizes["model", 0] + sizes["optim", 0] if kind is Megatron else 0
    return Story(ranks, went_on, sizes, others)


@pytest.fixture(scope="module", params=[Megatron, Fsdp2])
def killed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Story:
    return story(tmp_path_factory.mktemp("killed"), request.param)


@pytest.mark.parametrize("name", ["volume lost", "flipped byte", "node lost"])
def test_training_goes_on_as_if_nothing_had_been(killed: Story, name: str) -> None:
    for rank, before in zip(killed.ranks, killed.went_on, strict=True):
        assert rank[name]["next"] == before["next"]


def test_a_volume_that_has_lost_every_bit_is_not_read(killed: Story) -> None:
    told = killed.told("volume lost")
    assert (told.step, told.memory_bytes, told.volume_bytes) == (1, killed.read, 0)
    assert told.neighbour_bytes is None


def test_a_file_with_a_flipped_byte_in_every_memory_is_read_from_the_volume(
    killed: Story,
) -> None:
    told, flipped = killed.told("flipped byte"), killed.sizes["optim", VICTIM]
    assert told.volume_bytes == flipped
    assert told.memory_bytes == killed.read - flipped
    assert told.neighbour_bytes is None


def test_what_a_lost_node_had_is_restored_from_its_neighbours_memory_alone(
    killed: Story,
) -> None:
    told = killed.told("node lost")
    assert told.neighbour_bytes == sum(killed.sizes[part, VICTIM] for part in PARTS)
    assert told.volume_bytes == killed.others, "the volume has lost the other files"
    assert told.memory_bytes == killed.read - killed.others


def test_another_layout_reads_what_its_pods_have_and_the_rest_from_the_volume(
    killed: Story,
) -> None:
    if "other layout" not in killed.ranks[0]:
        pytest.skip("FSDP has no other layout of two ranks")
    told = killed.told("other layout")
    assert told.memory_bytes > 0
    assert told.volume_bytes >= killed.sizes["optim", VICTIM], "its copies have a flipped byte"
    for rank, before in zip(killed.ranks, killed.went_on, strict=True):
        assert rank["other layout"]["loaded"] == before["saved"]
