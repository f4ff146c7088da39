"""State dicts of Megatron in a bucket: what explorers, agents and ranks read, on a real S3 server.

The models are none of Megatron's: what says which boxes a rank holds is this module's.
"""

import logging
import time
from collections.abc import Iterator, Mapping
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from trainsync import (
    Resume,
    RunContext,
    TrainedMegatron,
    all_ranks,
    megatron_load_state_dict,
    megatron_save_state_dict,
)
from trainsync.agent.agent import Agent
from trainsync.agent.fellows.reader import FellowsBucketReader
from trainsync.agent.fellows.registry import KnownFellows
from trainsync.agent.fellows.sharing import FellowServer
from trainsync.agent.fellows.versions import HeldVersions
from trainsync.agent.intervals import AgentIntervals
from trainsync.agent.metrics import AgentMetrics
from trainsync.agent.settings import read_settings
from trainsync.agent.state import AgentState, ReadinessLimits
from trainsync.api import env
from trainsync.api.protocol import Fellow, SaveKind, SaveState
from trainsync.checkpoint.errors import (
    CorruptCheckpointError,
    LoadTimeoutError,
    UnsupportedPlaceError,
)
from trainsync.checkpoint.load.stored import StoredFiles
from trainsync.checkpoint.megatron_shards import Box
from trainsync.checkpoint.merge.megatron_names import HuggingFaceNames
from trainsync.engines.megatron import state_dicts, weights_loading
from trainsync.runtime.relays.committed_weights import read_stored_weights, read_weights
from trainsync.storage.block_digests import BLOCK
from trainsync.storage.objects import commits
from trainsync.weights.errors import DigestMismatchError, WeightsUnavailableError
from trainsync.weights.transports.volume.stored import ReadsStoredWeights, StoredStateDicts
from trainsync.weights.versions import CheckpointLocation, Published

from tests.store.conftest import Place
from tests.store.servers.fault_proxy import Fault
from tests.unit.agent.conftest import Watched, has
from tests.unit.agent.fake_server import FakeServer

pytestmark = pytest.mark.timeout(240)

STATE_DICT = SaveKind.STATE_DICT
RANKS = 2
LAYERS, HIDDEN, VOCABULARY, PADDED = 2, 64, 40_000, 40_960
_log = logging.getLogger(__name__)


def config() -> Any:
    from transformers import Qwen2Config

    return Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        intermediate_size=32,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
    )


def tensors(step: int) -> dict[str, tuple[int, torch.Tensor]]:
    """Whole tensors of a model, and how many leading dimensions each has."""
    made = torch.Generator().manual_seed(step)

    def some(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=made).to(torch.bfloat16)

    return {
        "embedding.word_embeddings.weight": (0, some(PADDED, HIDDEN)),
        "decoder.layers.self_attention.linear_qkv.weight": (1, some(LAYERS, 128, HIDDEN)),
        "decoder.layers.mlp.linear_fc1.weight": (1, some(LAYERS, 64, HIDDEN)),
        "decoder.final_layernorm.weight": (0, some(HIDDEN)),
    }


def boxes(step: int, rank: int) -> Iterator[Box]:
    """A tensor parallel rank's rows of each tensor; rank 0 has what is of one dimension."""
    for key, (leading, whole) in tensors(step).items():
        shape = tuple(whole.shape)
        for index in product(*(range(length) for length in shape[:leading])):
            part = whole[index]
            if part.dim() == 1:
                if rank == 0:
                    yield Box(key, shape, (*index, 0), leading, False, part)
                continue
            rows = part.shape[0] // RANKS
            held = part[rank * rows : (rank + 1) * rows].clone()
            start = (*index, rank * rows, *(0 for _ in part.shape[1:]))
            yield Box(key, shape, start, leading, False, held)


def expected(step: int) -> dict[str, torch.Tensor]:
    """The weights as Hugging Face has them."""
    names = HuggingFaceNames(config())
    return {
        name: part
        for key, (leading, whole) in tensors(step).items()
        for index in product(*(range(length) for length in whole.shape[:leading]))
        for name, part in names.convert(key, index, whole[index])
    }


class Training:
    """Both ranks of a run, in this process."""

    def __init__(self, ctx: RunContext, monkeypatch: pytest.MonkeyPatch) -> None:
        self._ctx = ctx
        self._patch = monkeypatch
        self.coordinators = [ctx.coordinator(rank, RANKS) for rank in range(RANKS)]
        sizes = {"tp": RANKS, "pp": 1, "ep": 1, "cp": 1, "dp": 1}
        zeros = dict.fromkeys(sizes, 0)
        layout = SimpleNamespace(sizes=sizes, coordinates=zeros)
        monkeypatch.setattr(state_dicts, "ParallelLayout", lambda: layout)

    def engine(self, hf_config: Any) -> TrainedMegatron:
        return TrainedMegatron([torch.nn.Linear(1, 1)], SimpleNamespace(hf_config=hf_config))

    def save(self, step: int, hf_config: Any = None) -> None:
        engine = self.engine(hf_config or config())
        self.coordinators[0].register(
            step, state_dict_participants=all_ranks("model", world_size=RANKS)
        )
        for rank, coordinator in enumerate(self.coordinators):
            held = list(boxes(step, rank))
            self._patch.setattr(state_dicts, "own_boxes", lambda _, held=held: held)
            megatron_save_state_dict(engine, "actor", step, coordinator, _log)
        assert self._ctx.monitor.save_status(STATE_DICT, step, 60).state is SaveState.COMMITTED


@pytest.fixture
def training(place: Place, monkeypatch: pytest.MonkeyPatch) -> Iterator[Training]:
    pytest.importorskip("mbridge")
    environ = {
        env.CHECKPOINT_DIR: place.url(),
        env.RUN_NAME: f"run-{place.name}",
        env.SYNC_METHOD: "checkpoint",
        env.SYNC_TIMEOUT_SECONDS: "60",
    }
    with RunContext.from_env(place.url(), environ=environ) as ctx:
        ctx.resume()
        yield Training(ctx, monkeypatch)


def fetch(
    place: Place, step: int, seconds: float = 60, read: ReadsStoredWeights = read_stored_weights
) -> Mapping[str, torch.Tensor]:
    stored = commits.read_manifest(place.open(), STATE_DICT, step)
    where = CheckpointLocation(f"global_step_{step}", stored.digest, 0, step)
    published = Published.saved(step, stored.digest, stored.manifest.bytes, where)
    source = StoredStateDicts(place.open(), read)
    return source.fetch(published, seconds).state_dict


def same(found: Mapping[str, torch.Tensor], wanted: Mapping[str, torch.Tensor]) -> bool:
    return found.keys() == wanted.keys() and all(torch.equal(found[n], wanted[n]) for n in wanted)


def test_weights_come_whole_under_the_names_that_hugging_face_has(
    place: Place, training: Training
) -> None:
    training.save(1)
    before = len(place.proxy.sent)
    found = fetch(place, 1)
    assert same(found, expected(1))
    assert all(tensor.device.type == "cpu" and tensor.is_contiguous() for tensor in found.values())
    read = sum(size for path, size in place.proxy.sent[before:] if "/objects/" in path)
    size = commits.read_manifest(place.open(), STATE_DICT, 1).manifest.bytes
    assert read < 1.5 * size, "blocks at the borders of tensors come twice, and no others"


def break_file(place: Place, name: str, fault: str) -> None:
    (path,) = [key for key in place.files.glob("runs/a/objects/**/*") if key.name == name]
    if fault == "gone":
        path.unlink()
    else:
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(data)


@pytest.mark.parametrize("name", ["model_world_size_2_rank_1.pt", "config.json"])
@pytest.mark.parametrize("fault", ["damaged", "gone"])
def test_a_file_that_is_damaged_or_gone_is_refused(
    place: Place, training: Training, name: str, fault: str
) -> None:
    training.save(1)
    break_file(place, name, fault)
    with pytest.raises(DigestMismatchError, match=name.replace(".", r"\.")):
        fetch(place, 1)


def test_a_read_that_takes_too_long_is_given_up(place: Place, training: Training) -> None:
    training.save(1)
    place.proxy.break_next(Fault.DELAYED, "GET", r"rank_1\.pt", seconds=2.0)
    began = time.monotonic()
    with pytest.raises(WeightsUnavailableError):
        fetch(place, 1, seconds=1.0)
    assert time.monotonic() - began < 30


def test_what_an_engine_writes_itself_is_refused(training: Training) -> None:
    with pytest.raises(UnsupportedPlaceError, match="needs a run on a volume"):
        megatron_save_state_dict(
            training.engine(config()), "actor", 1, training.coordinators[0], _log, synchronous=True
        )


def test_a_servers_agent_follows_them(place: Place, training: Training, tmp_path: Path) -> None:
    memory = tmp_path / "memory"
    memory.mkdir()
    vllm = FakeServer(memory)
    options = [f"--server={vllm.url}", f"--directory={place.url()}", "--port=0", "--timeout=60"]
    given = read_settings([*options, f"--memory={memory}"], {})
    agent = Agent(given, None, AgentIntervals(cycle=0.05, feed=0.05, look=0.05, retry=0.1))
    try:
        watched = Watched(agent)
        for step in (1, 2):
            training.save(step)
            watched.until_ready_with(step)
            assert has(vllm, expected(step))
    finally:
        assert agent.close()
        vllm.stop()


def test_agents_pass_them_on(place: Place, training: Training, tmp_path: Path) -> None:
    training.save(1)
    fellows: list[Fellow] = []
    servers: list[FellowServer] = []
    before = len(place.proxy.sent)
    try:
        for name in ("a", "b"):
            server = FellowServer("127.0.0.1", lambda: "key", 5.0)
            servers.append(server)
            held = HeldVersions(
                tmp_path / name,
                lambda name=name: KnownFellows(name, "key", tuple(fellows)),  # type: ignore[misc]
                server,
                AgentMetrics(AgentState, ReadinessLimits(1, False, 60)),
                10.0,
                lambda _: 1 << 40,
            )
            reader = FellowsBucketReader(read_weights, read_stored_weights, held)
            assert same(fetch(place, 1, read=reader), expected(1))
            fellows.append(Fellow(name=name, address=server.address))
    finally:
        for server in servers:
            server.close()
    read = sum(size for path, size in place.proxy.sent[before:] if "/objects/" in path)
    assert read == commits.read_manifest(place.open(), STATE_DICT, 1).manifest.bytes


# -- ranks that load them ---------------------------------------------------------------------

EMBEDDING = "embedding.word_embeddings.weight"
FIRST, ROWS = PADDED * 3 // 8, PADDED // 2
"""The rows of a rank between those of the two that saved."""


@pytest.fixture
def live(monkeypatch: pytest.MonkeyPatch) -> torch.nn.Linear:
    """A rank's rows of the embedding."""
    model = torch.nn.Linear(HIDDEN, ROWS, bias=False, dtype=torch.bfloat16)
    tensor = SimpleNamespace(
        key=EMBEDDING,
        global_shape=(PADDED, HIDDEN),
        local_shape=(ROWS, HIDDEN),
        global_offset=(FIRST, 0),
        prepend_axis_num=0,
        data=model.weight.data,
    )
    monkeypatch.setattr(weights_loading, "ParallelLayout", lambda: "tp=1")
    monkeypatch.setattr(weights_loading, "live_tensors", lambda models: [tensor])
    return model


def load(place: Place, live: torch.nn.Linear, timeout: float = 60) -> None:
    stored = commits.read_manifest(place.open(), STATE_DICT, 1)
    files = StoredFiles(place.url(), dict(stored.keys))
    resume = Resume(1, Path("global_step_1"), stored.manifest, store=files)
    engine = TrainedMegatron([live], SimpleNamespace(hf_config=None))
    place.proxy.sent.clear()
    megatron_load_state_dict(engine, resume, _log, timeout=timeout)


def test_a_rank_of_another_layout_reads_its_ranges_in_spite_of_faults(
    place: Place, training: Training, live: torch.nn.Linear
) -> None:
    training.save(1)
    rules = [
        place.proxy.break_next(fault, "GET", rf"rank_{rank}\.pt$", after=1)
        for rank, fault in enumerate((Fault.TRUNCATED, Fault.CORRUPTED))
    ]
    load(place, live)
    assert [rule.left for rule in rules] == [0, 0]
    assert torch.equal(live.weight, tensors(1)[EMBEDDING][1][FIRST : FIRST + ROWS])
    read = sum(size for path, size in place.proxy.sent if path.split("?")[0].endswith(".pt"))
    part = live.weight.nbytes
    assert part < read < 1.5 * part + 2 * BLOCK, "what was broken comes twice, and no other rows"


@pytest.mark.parametrize("fault", ["damaged", "gone"])
def test_a_rank_refuses_a_file_that_is_damaged_or_gone_and_keeps_its_weights(
    place: Place, training: Training, live: torch.nn.Linear, fault: str
) -> None:
    training.save(1)
    before = live.weight.detach().clone()
    break_file(place, "model_world_size_2_rank_1.pt", fault)
    with pytest.raises(CorruptCheckpointError, match=r"rank_1\.pt"):
        load(place, live)
    assert torch.equal(live.weight, before)


def test_a_load_of_a_rank_has_its_deadline(
    place: Place, training: Training, live: torch.nn.Linear
) -> None:
    training.save(1)
    place.proxy.break_next(Fault.DELAYED, "GET", r"rank_1\.pt", seconds=2.0)
    with pytest.raises(LoadTimeoutError, match="step 1 could not be read in time"):
        load(place, live, timeout=1.0)
