"""A Hugging Face directory out of shards: equal to the last bit, loadable, and whole or absent."""

import asyncio
import json
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from trainsync.api.protocol import SaveKind
from trainsync.checkpoint.coordinator import CheckpointCoordinator
from trainsync.checkpoint.errors import CorruptCheckpointError, MergeError
from trainsync.checkpoint.load.reshard.plan import Layout, Split
from trainsync.checkpoint.merge import merge
from trainsync.checkpoint.merge.merge import merge_to_hf
from trainsync.checkpoint.merge.safetensors import Entry, partition, write
from trainsync.monitor.client.local import LocalMonitorClient
from transformers import (
    AutoModelForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from tests.unit.checkpoint.sharded import sharded

STEP = 5
TWO_RANKS = ((2,), (0, 1), (Split(0),))
# FSDP over tensor parallelism on six ranks, in an order of their own.
SIX_RANKS = ((3, 2), (4, 1, 0, 5, 2, 3), (Split(0, 2), Split(0)))


def build(*, tied: bool = True, dtype: torch.dtype = torch.float32) -> Any:
    torch.manual_seed(1)
    config = Qwen2Config(
        vocab_size=33,  # odd: shards of unequal size
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        tie_word_embeddings=tied,
        architectures=["Qwen2ForCausalLM"],
        bos_token_id=None,
        eos_token_id=None,
    )
    return Qwen2ForCausalLM(config).to(dtype)


def small_files(model: Any) -> dict[str, bytes]:
    return {
        "huggingface/config.json": model.config.to_json_string().encode(),
        "huggingface/generation_config.json": model.generation_config.to_json_string().encode(),
        "huggingface/tokenizer.json": b"{}",
        "fsdp_config.json": b"{}",
    }


def cut(state: dict[str, torch.Tensor], how: Any) -> dict[int, dict[str, Any]]:
    """Each rank's state; weights that are one stay one, as in a model that FSDP2 shards."""
    mesh, ranks, splits = how
    states: dict[int, dict[str, Any]] = {rank: {} for rank in ranks}
    done: dict[int, dict[int, torch.Tensor]] = {}
    for name, tensor in state.items():
        parts = done.get(tensor.data_ptr())
        if parts is None:
            layout = Layout(tuple(tensor.shape), mesh, ranks, splits)
            parts = done[tensor.data_ptr()] = sharded(tensor.detach(), layout)
        for rank, part in parts.items():
            states[rank][name] = part
    return states


Commit = Callable[..., Path]


@pytest.fixture
def commit(tmp_path: Path) -> Iterator[Commit]:
    """Commits every rank's state of a model, with files beside it."""
    directory = tmp_path / "run"
    monitor = LocalMonitorClient(directory, attempt=0, incarnation="0123456789abcdef")
    monitor.claim("local")

    def do(
        states: Mapping[int, Any],
        attachments: dict[str, bytes],
        *,
        world_size: int | None = None,
        is_state_dict: bool = False,
    ) -> Path:
        world_size = world_size or len(states)
        for rank, state in states.items():
            coordinator = CheckpointCoordinator(
                monitor, directory, rank=rank, world_size=world_size
            )
            coordinator.save_sync(
                "model",
                state,
                STEP,
                is_state_dict=is_state_dict,
                attachments=attachments if rank == 0 else {},
            )
        everyone = [("model", rank) for rank in states]
        kind = "state_dict_participants" if is_state_dict else "checkpoint_participants"
        asyncio.run(
            coordinator.register_and_monitor(
                STEP, is_state_dict=is_state_dict, timeout=30, **{kind: everyone}
            )
        )
        return directory

    yield do
    monitor.close()


def weights(output: Path) -> dict[str, torch.Tensor]:
    """Every tensor, from the index or the one file."""
    found = {}
    for path in sorted(output.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            assert file.metadata() == {"format": "pt"}
            for name in file.keys():  # noqa: SIM118 - not a mapping
                assert name not in found
                found[name] = file.get_tensor(name)
    return found


def assert_loads_as(output: Path, model: Any) -> None:
    loaded, info = AutoModelForCausalLM.from_pretrained(output, output_loading_info=True)
    assert not any(info.values()), info
    expected, found = model.state_dict(), loaded.state_dict()
    assert list(found) == list(expected)
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor), name


@pytest.mark.parametrize("how", [TWO_RANKS, SIX_RANKS])
@pytest.mark.parametrize("tied", [True, False])
def test_the_merged_model_is_the_model_bit_for_bit(
    commit: Commit, tmp_path: Path, how: Any, tied: bool
) -> None:
    model = build(tied=tied)
    directory = commit(cut(model.state_dict(), how), small_files(model))
    told: list[tuple[int, int]] = []
    output = tmp_path / "merged" / "model"
    result = merge_to_hf(
        directory, STEP, output, on_progress=lambda done, total: told.append((done, total))
    )
    assert_loads_as(output, model)
    found = weights(output)
    assert ("lm_head.weight" in found) is not tied
    assert result.tied == (("lm_head.weight",) if tied else ())
    assert result.tensors == len(found)
    assert result.bytes == sum(t.numel() * t.element_size() for t in found.values())
    assert result.files == tuple(sorted(path.name for path in output.iterdir()))
    assert set(result.files) == {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
    }
    assert [done for done, _ in told] == sorted(done for done, _ in told)
    assert told[-1][0] == told[-1][1] > 2 * result.bytes
    assert not list((directory / ".trainsync").glob("leases/*.json"))


def test_experts_are_written_as_save_pretrained_writes_them(commit: Commit, tmp_path: Path) -> None:
    torch.manual_seed(2)
    config = Qwen3MoeConfig(
        vocab_size=11,
        hidden_size=8,
        intermediate_size=12,
        moe_intermediate_size=6,
        num_experts=3,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=4,
        architectures=["Qwen3MoeForCausalLM"],
        bos_token_id=None,
        eos_token_id=None,
    )
    model = Qwen3MoeForCausalLM(config)
    model.save_pretrained(tmp_path / "theirs")
    assert len(weights(tmp_path / "theirs")) > len(model.state_dict())  # one tensor holds many
    directory = commit(cut(model.state_dict(), TWO_RANKS), small_files(model))
    merge_to_hf(directory, STEP, tmp_path / "out", max_shard_bytes=1000)
    found, expected = weights(tmp_path / "out"), weights(tmp_path / "theirs")
    assert set(found) == set(expected)
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert_loads_as(tmp_path / "out", model)


def test_a_state_dict_is_merged_into_files_of_a_size_and_another_dtype(
    commit: Commit, tmp_path: Path
) -> None:
    model = build()
    directory = commit(cut(model.state_dict(), TWO_RANKS), small_files(model), is_state_dict=True)
    output = tmp_path / "empty"
    output.mkdir()
    result = merge_to_hf(
        directory,
        STEP,
        output,
        kind=SaveKind.STATE_DICT,
        dtype="bfloat16",
        max_shard_bytes=2000,
    )
    index = json.loads((output / "model.safetensors.index.json").read_text())
    files = set(index["weight_map"].values())
    assert len(files) > 2
    assert set(index["weight_map"]) == set(weights(output))
    assert index["metadata"]["total_size"] == result.bytes
    for name in files:
        with safe_open(output / name, "pt") as file:
            keys = list(file.keys())
            size = sum(file.get_tensor(key).numel() * 2 for key in keys)
        assert size <= 2000 or len(keys) == 1
    assert_loads_as(output, build(dtype=torch.bfloat16))


def test_a_model_that_no_rank_shares_and_wrappers_left_names_in(
    commit: Commit, tmp_path: Path
) -> None:
    model = build()
    wrapped = {
        f"module._orig_mod.{name}".replace("layers.0.", "layers.0._fsdp_wrapped_module."): tensor
        for name, tensor in model.state_dict().items()
    }
    directory = commit({0: wrapped}, small_files(model), world_size=4)
    merge_to_hf(directory, STEP, tmp_path / "out")
    assert_loads_as(tmp_path / "out", model)


def test_a_replicated_model_is_one_copy_and_unequal_ranks_are_refused(
    commit: Commit, tmp_path: Path
) -> None:
    model = build()
    states = {rank: dict(model.state_dict()) for rank in (0, 1)}
    directory = commit(states, small_files(model))
    merge_to_hf(directory, STEP, tmp_path / "out")
    assert_loads_as(tmp_path / "out", model)


def test_plain_shards_of_several_ranks_are_refused(commit: Commit, tmp_path: Path) -> None:
    model = build()
    name = "model.norm.weight"
    states = {rank: model.state_dict() | {name: torch.full((16,), float(rank))} for rank in (0, 1)}
    directory = commit(states, small_files(model))
    assert_refused(directory, tmp_path, f"{name} is a plain tensor that differs between ranks")


def assert_refused(
    directory: Path,
    tmp_path: Path,
    why: str,
    error: type[Exception] = MergeError,
    **options: Any,
) -> None:
    """With a sentence, and nothing is left behind."""
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(error, match=why):
        merge_to_hf(directory, STEP, tmp_path / "out", **options)
    after = [path for path in sorted(tmp_path.rglob("*")) if ".trainsync" not in path.parts]
    assert after == [path for path in before if ".trainsync" not in path.parts]


def test_what_cannot_be_merged_is_refused_with_what_was_expected(
    commit: Commit, tmp_path: Path
) -> None:
    model = build()
    states = cut(model.state_dict(), TWO_RANKS)
    directory = commit(states, small_files(model))
    assert_refused(directory, tmp_path, "dtype 'int8' is not one of float32", dtype="int8")
    assert_refused(directory, tmp_path, "no component model in critic/", subdir="critic")
    assert_refused(
        directory, tmp_path, "no state_dict of step 5 .* there is none", kind=SaveKind.STATE_DICT
    )
    with pytest.raises(MergeError, match=r"no checkpoint of step 6 is committed.*the last are 5"):
        merge_to_hf(directory, 6, tmp_path / "out")
    with pytest.raises(MergeError, match="inside the run's directory"):
        merge_to_hf(directory, STEP, directory / "merged")
    full = tmp_path / "full"
    full.mkdir()
    (full / "mine").write_text("precious")
    with pytest.raises(MergeError, match="full is not empty"):
        merge_to_hf(directory, STEP, full)
    with pytest.raises(MergeError, match="mine is not a directory"):
        merge_to_hf(directory, STEP, full / "mine")
    assert (full / "mine").read_text() == "precious"


def with_lora(*layers: str, tied: bool = False, **settings: Any) -> tuple[Any, dict[str, bytes]]:
    """A PEFT model, and the files saved beside its shards."""
    from peft import LoraConfig, get_peft_model
    from trainsync.engines.lora import adapters

    base = build(tied=tied)
    targets = list(layers or ("q_proj", "up_proj"))
    config = LoraConfig(r=4, lora_alpha=12, target_modules=targets, **settings)
    model: Any = get_peft_model(base, config)
    torch.manual_seed(2)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter)
    meta = json.dumps(adapters.train_meta(model)).encode()
    return model, {**small_files(base), "lora_train_meta.json": meta}


@pytest.mark.parametrize("settings", [{}, {"use_rslora": True}])
@pytest.mark.parametrize("dtype", [None, "bfloat16"])
def test_an_adapter_that_was_saved_beside_its_base_model_is_merged_into_it(
    commit: Commit, tmp_path: Path, settings: dict[str, Any], dtype: str | None
) -> None:
    pytest.importorskip("peft", reason="the extra `verl` is not installed")
    model, files = with_lora(**settings)
    directory = commit(cut(model.state_dict(), TWO_RANKS), files)
    result = merge_to_hf(directory, STEP, tmp_path / "out", dtype=dtype)
    expected = model.merge_and_unload().state_dict()
    found = AutoModelForCausalLM.from_pretrained(result.output).state_dict()
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor.to(found[name].dtype)), name


def test_an_adapter_that_was_saved_alone_is_merged_into_the_base_model_that_is_given(
    commit: Commit, tmp_path: Path
) -> None:
    pytest.importorskip("peft", reason="the extra `verl` is not installed")
    model, files = with_lora()
    alone = {name: tensor for name, tensor in model.state_dict().items() if "lora_" in name}
    directory = commit(cut(alone, TWO_RANKS), files)
    build(tied=False).save_pretrained(tmp_path / "base")
    result = merge_to_hf(directory, STEP, tmp_path / "out", base=tmp_path / "base")
    expected = model.merge_and_unload().state_dict()
    found = AutoModelForCausalLM.from_pretrained(result.output).state_dict()
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


def test_a_base_model_is_refused_where_the_checkpoint_has_its_own_or_it_has_no_weights(
    commit: Commit, tmp_path: Path
) -> None:
    model = build(tied=False)
    directory = commit(cut(model.state_dict(), TWO_RANKS), small_files(model))
    model.save_pretrained(tmp_path / "base")
    for base, why in (("base", "expected no base"), ("nothing", "has no [*].safetensors")):
        with pytest.raises(MergeError, match=why):
            merge_to_hf(directory, STEP, tmp_path / "out", base=tmp_path / base)


def test_an_adapter_of_a_weight_that_is_two_is_refused(commit: Commit, tmp_path: Path) -> None:
    pytest.importorskip("peft", reason="the extra `verl` is not installed")
    model, files = with_lora("lm_head", tied=True)
    directory = commit(cut(model.state_dict(), TWO_RANKS), files)
    with pytest.raises(MergeError, match=r"adapter changes lm_head.* which is one weight"):
        merge_to_hf(directory, STEP, tmp_path / "out")


@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        (lambda states, files: files.pop("lora_train_meta.json"), "expected lora_alpha in"),
        (
            lambda states, files: [
                state.pop(name) for state in states for name in list(state) if "base_l" in name
            ],
            "has no base weight in the checkpoint; expected the base model's weights beside",
        ),
    ],
)
def test_an_adapter_without_what_merging_takes_is_refused(
    commit: Commit, tmp_path: Path, spoil: Callable[..., object], why: str
) -> None:
    pytest.importorskip("peft", reason="the extra `verl` is not installed")
    model, files = with_lora()
    states = cut(model.state_dict(), TWO_RANKS)
    spoil(states.values(), files)
    with pytest.raises(MergeError, match=why):
        merge_to_hf(commit(states, files), STEP, tmp_path / "out")


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda state: state.pop("model.norm.weight"), "the checkpoint lacks model.norm.weight"),
        (
            lambda state: state.update(
                {"model.layers.0.mlp.up_proj.lora_A.weight": torch.zeros(1)}
            ),
            "belongs to an adapter that is not plain LoRA",
        ),
        (
            lambda state: state.update({"_orig_mod.model.norm.weight": torch.zeros(1)}),
            "are both model.norm.weight without wrappers",
        ),
        (
            lambda state: state.update({"lm_head.weight": torch.zeros(33, 16)}),
            "lm_head.weight and model.embed_tokens.weight are one weight",
        ),
        (lambda state: state.update({"note": "hello"}), "note is a str; expected weights"),
        (
            lambda state: state.update({"model.norm.weight": torch.zeros(16, dtype=torch.cfloat)}),
            "complex64, which safetensors has not",
        ),
    ],
)
def test_a_state_that_is_not_a_models_is_refused(
    commit: Commit, tmp_path: Path, change: Callable[[dict[str, Any]], object], why: str
) -> None:
    model = build()
    state = dict(model.state_dict())
    change(state)
    directory = commit({0: state}, small_files(model))
    assert_refused(directory, tmp_path, why)


def test_a_state_without_weights_is_refused(commit: Commit, tmp_path: Path) -> None:
    """As older versions of trainsync let it be saved."""

    def save(directory: Path) -> None:
        torch.save({}, directory / "model_world_size_1_rank_0.pt")

    directory = commit({0: save}, small_files(build()))
    assert_refused(directory, tmp_path, "hold no tensors")


@pytest.mark.parametrize(
    ("content", "why"),
    [(None, "has no actor/huggingface/config.json; expected"), (b"{", "config.json cannot be")],
)
def test_a_step_without_a_configuration_is_refused(
    commit: Commit, tmp_path: Path, content: bytes | None, why: str
) -> None:
    model = build()
    attachments = {} if content is None else {"huggingface/config.json": content}
    directory = commit({0: dict(model.state_dict())}, attachments)
    assert_refused(directory, tmp_path, why)


def test_a_class_that_transformers_does_not_have_is_written_as_it_is(
    commit: Commit, tmp_path: Path
) -> None:
    state = {"a": torch.arange(3.0), "b": torch.ones(2, dtype=torch.int64)}
    config = b'{"model_type": "mine", "architectures": ["Mine"], "torch_dtype": "float16"}'
    directory = commit({0: state}, {"huggingface/config.json": config})
    merge_to_hf(directory, STEP, tmp_path / "out", dtype="bfloat16")
    found = weights(tmp_path / "out")
    assert {name: tensor.dtype for name, tensor in found.items()} == {
        "a": torch.bfloat16,
        "b": torch.int64,
    }
    assert json.loads((tmp_path / "out/config.json").read_text())["dtype"] == "bfloat16"


@pytest.mark.parametrize(
    ("damage", "why"),
    [
        (lambda path: path.write_bytes(path.read_bytes()[:-1]), "bytes, expected"),
        (Path.unlink, "is missing"),
        (
            lambda path: path.write_bytes(
                path.read_bytes()[:9000] + b"?" + path.read_bytes()[9001:]
            ),
            "has digest .* expected",
        ),
    ],
)
@pytest.mark.parametrize("name", ["model_world_size_2_rank_0.pt", "model_world_size_2_rank_1.pt"])
def test_damage_is_found_and_named_and_leaves_nothing(
    commit: Commit, tmp_path: Path, damage: Callable[[Path], object], why: str, name: str
) -> None:
    model = build()
    directory = commit(cut(model.state_dict(), TWO_RANKS), small_files(model))
    damage(directory / f"global_step_{STEP}/actor" / name)
    assert_refused(directory, tmp_path, f"{name}.*{why}", CorruptCheckpointError)


def test_a_disk_that_fails_while_it_is_written_leaves_nothing(
    commit: Commit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = build()
    directory = commit(cut(model.state_dict(), TWO_RANKS), small_files(model))

    def full(*arguments: object) -> None:
        write(*arguments)  # type: ignore[arg-type]
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(merge, "write", full)
    threads = torch.get_num_threads()
    assert_refused(directory, tmp_path, "No space left", OSError)
    assert torch.get_num_threads() == threads  # a merge takes one alone, and gives them back


def test_files_are_filled_in_order_and_wide_elements_come_first() -> None:
    entries = [
        Entry("a", torch.uint8, (3,)),
        Entry("b", torch.float32, (2,)),
        Entry("c", torch.bfloat16, (100,)),
        Entry("d", torch.uint8, ()),
        Entry("e", torch.uint8, (0, 5)),
    ]
    names = [[entry.name for entry in file] for file in partition(entries, 11)]
    assert names == [["b", "a"], ["c"], ["d", "e"]]


@pytest.mark.parametrize(
    "dtype",
    [torch.float64, torch.float16, torch.float8_e4m3fn, torch.int16, torch.bool, torch.uint8],
)
def test_what_is_written_is_what_safetensors_reads(tmp_path: Path, dtype: torch.dtype) -> None:
    tensors = [torch.arange(6).reshape(2, 3).to(dtype), torch.zeros(0, 2, dtype=dtype)]
    entries = [Entry(f"t{n}", dtype, tuple(t.shape)) for n, t in enumerate(tensors)]
    told: list[int] = []
    write(tmp_path / "x.safetensors", entries, iter(tensors), told.append)
    with safe_open(tmp_path / "x.safetensors", "pt") as file:
        for number, tensor in enumerate(tensors):
            found = file.get_tensor(f"t{number}")
            assert (found.dtype, found.shape) == (dtype, tensor.shape)
            assert torch.equal(found.view(torch.uint8), tensor.view(torch.uint8))
    assert sum(told) == 6 * dtype.itemsize
