"""Layers as vLLM's loaders leave them, compared: ``layer_cases.py``, in vLLM's environment.

Prints ``CASE NAME`` for each case that went well.
"""

import tempfile
import traceback
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import save_file
from trainsync.integrations.vllm.checks.layers import LayerCheck, Looked
from trainsync.integrations.vllm.loaded_model import LoadedModel
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import (
    UnquantizedFusedMoEMethod,
)
from vllm.model_executor.layers.linear import (
    ColumnParallelLinear,
    QKVParallelLinear,
    ReplicatedLinear,
    RowParallelLinear,
)
from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm
from vllm.model_executor.layers.vocab_parallel_embedding import (
    ParallelLMHead,
    VocabParallelEmbedding,
)

State = dict[str, torch.Tensor]


def _layer(kind: type[torch.nn.Module], weight: torch.Tensor | None, **attributes: Any) -> Any:
    """A layer of a class of vLLM, which otherwise wants a distributed group."""
    layer = object.__new__(kind)
    torch.nn.Module.__init__(layer)
    for name, value in attributes.items():
        setattr(layer, name, value)
    if weight is not None:
        layer.weight = torch.nn.Parameter(weight.clone(), requires_grad=False)
    return layer


def _embedding(kind: type[torch.nn.Module], weight: torch.Tensor) -> Any:
    rows = SimpleNamespace(org_vocab_start_index=0, org_vocab_end_index=len(weight))
    return _layer(kind, weight, shard_indices=rows, input_size=weight.shape[1])


def _check(*, tied: bool = False, **layers: torch.nn.Module) -> LayerCheck:
    model = torch.nn.Module()
    for name, layer in layers.items():
        model.add_module(name, layer)
    return LayerCheck(model, tied=tied)


def _numbers(*shape: int, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def _is_accepted(looked: Looked) -> bool:
    return not looked.wrong


def bias_of_zeros_in_an_order_of_the_models_own() -> None:
    """Nobody can see the order while all numbers are equal, as before the first step."""
    norm = _layer(torch.nn.Module, torch.zeros(8))
    check = _check(norm=norm)
    assert check.look({"norm.weight": torch.zeros(8)}, "0").right
    trained = torch.arange(8.0)
    norm.weight.copy_(trained.flip(0))
    assert _is_accepted(check.look({"norm.weight": trained}, "1"))


def vector_cut_for_the_second_worker() -> None:
    """Its part may be the first one's by chance."""
    norm = _layer(torch.nn.Module, torch.arange(4.0))
    check = _check(norm=norm)
    check.look({"norm.weight": torch.arange(4.0).repeat(2)}, "0")
    norm.weight.add_(1)
    trained = torch.cat([torch.arange(4.0), torch.arange(4.0) + 1])
    assert _is_accepted(check.look({"norm.weight": trained}, "1"))


def convolution_whose_last_rows_are_replicated() -> None:
    """As of Mamba 2 with one group and two workers: most rows are those of a plain layer."""
    whole = _numbers(4352 * 2 - 256, 1, 4)
    kept = torch.cat([whole[:4096], whole[8192:]])
    layer = _layer(ColumnParallelLinear, kept, output_size_per_partition=4352, tp_rank=0)
    check = _check(conv1d=layer)
    for seed in range(300):
        looked = check.look({"conv1d.weight": whole}, str(seed))
        assert not looked.right
        assert _is_accepted(looked)


def weights_in_eight_bits() -> None:
    """vLLM quantises them anew, or not, by the scales that come with them."""
    kept = _numbers(8, 8).to(torch.float8_e4m3fn)
    layer = _layer(ReplicatedLinear, kept, output_size=8, input_size=8)
    assert not _check(layer=layer).look({"layer.weight": kept}, "0").right


def scales_of_a_linear_layer() -> None:
    """vLLM takes the largest of a fused layer's."""
    layer = _layer(ReplicatedLinear, None, output_size=8, input_size=8)
    layer.weight_scale = torch.nn.Parameter(torch.arange(8.0), requires_grad=False)
    assert not _check(layer=layer).look({"layer.weight_scale": torch.arange(8.0)}, "0").right


def embedding_with_old_weights_beside_new_packed_ones() -> None:
    """An embedding reads the former, a head that is tied to it computes with the latter."""
    old, new = _numbers(64, 32), _numbers(64, 32, seed=1)
    embedding = _embedding(VocabParallelEmbedding, old)
    dispatch_cpu_unquantized_gemm(embedding, remove_weight=False)
    check = _check(embed_tokens=embedding)
    assert check.look({"embed_tokens.weight": old}, "0").right
    embedding.weight = torch.nn.Parameter(new, requires_grad=False)
    dispatch_cpu_unquantized_gemm(embedding, remove_weight=False)
    embedding.weight = torch.nn.Parameter(old, requires_grad=False)
    assert check.look({"embed_tokens.weight": new}, "1").wrong == ("embed_tokens.weight",)


def packed_weights_with_a_nan() -> None:
    """They are those that were staged, whatever they are good for."""
    weight = _numbers(64, 32)
    check = _check(layer=_packed(weight))
    assert check.look({"layer.weight": weight}, "0").right
    weight[3, 5] = torch.nan
    check._model.layer = _packed(weight)
    assert _is_accepted(check.look({"layer.weight": weight}, "1"))


def _packed(weight: torch.Tensor) -> Any:
    rows, columns = weight.shape
    layer = _layer(ReplicatedLinear, weight, output_size=rows, input_size=columns)
    dispatch_cpu_unquantized_gemm(layer, remove_weight=True)
    return layer


def packed_layer_that_is_staged_transposed() -> None:
    """As in GPT-2's checkpoints: other layers are compared all the same."""
    weight = _numbers(64, 96)
    layer = _layer(
        RowParallelLinear, weight, output_size=64, input_size_per_partition=96, input_size=96,
        tp_rank=0,
    )  # fmt: skip
    dispatch_cpu_unquantized_gemm(layer, remove_weight=True)
    norm = _layer(torch.nn.Module, torch.arange(4.0))
    state = {"layer.weight": weight.T.contiguous(), "norm.weight": torch.arange(4.0)}
    assert _check(layer=layer, norm=norm).look(state, "0").right == {"norm.weight"}


def queries_and_keys_fused_with_more() -> None:
    """As of MiniMax M3: other layers are compared all the same."""
    layer = _layer(
        QKVParallelLinear, _numbers(20, 8), output_sizes=[4] * 5, tp_size=1, tp_rank=0,
        num_kv_head_replicas=1,
    )  # fmt: skip
    norm = _layer(torch.nn.Module, torch.arange(4.0))
    check = _check(qkv_proj=layer, norm=norm)
    check._model.packed_modules_mapping = {"qkv_proj": list("qkvab")}
    assert check.look({"norm.weight": torch.arange(4.0)}, "0").right == {"norm.weight"}


def experts_of_the_second_worker_in_padded_tensors() -> None:
    """As on a GPU, whose kernels do not pack them."""
    state: State = {}
    w13, w2 = torch.zeros(3, 2 * 6, 10), torch.zeros(3, 10, 6)
    for number in range(3):
        parts = {"gate": _numbers(8, 9, seed=number), "up": _numbers(8, 9, seed=number + 10)}
        down = _numbers(9, 8, seed=number + 20)
        w13[number, :4, :9], w13[number, 6:10, :9] = (part[4:] for part in parts.values())
        w2[number, :9, :4] = down[:, 4:]
        for part, tensor in {**parts, "down": down}.items():
            state[f"experts.{number}.{part}_proj.weight"] = tensor
    experts = _layer(
        RoutedExperts, None, quant_method=_layer(UnquantizedFusedMoEMethod, None, moe_kernel=None),
        _expert_map=None, moe_config=SimpleNamespace(tp_size=2, tp_rank=1),
    )  # fmt: skip
    experts.w13_weight = torch.nn.Parameter(w13.bfloat16(), requires_grad=False)
    experts.w2_weight = torch.nn.Parameter(w2.bfloat16(), requires_grad=False)
    check = _check(experts=torch.nn.ModuleDict({"routed_experts": experts}))
    names = tuple(f"experts.routed_experts.{name}_weight" for name in ("w13", "w2"))
    assert check.look(state, "0").right == set(names)
    for value, at, wrong in ((experts.w13_weight, (2, 9, 8), 0), (experts.w2_weight, (1, 8, 3), 1)):
        kept = value[at].clone()
        value[at] += 1
        assert check.look(state, "1").wrong == (names[wrong],)
        value[at] = kept
    assert _is_accepted(check.look(state, "2"))


def quantised_experts() -> None:
    """They have parameters of other names: other layers are compared all the same."""
    experts = _layer(RoutedExperts, None, quant_method=object(), _expert_map=None)
    experts.w13_qweight = torch.nn.Parameter(torch.zeros(2, 2, dtype=torch.int32), False)
    norm = _layer(torch.nn.Module, torch.arange(4.0))
    state: State = {"norm.weight": torch.arange(4.0)}
    assert _check(experts=experts, norm=norm).look(state, "0").right == {"norm.weight"}


def tied_head_that_is_staged_too() -> None:
    """It is not loaded: the head has the embedding's weights."""
    weight = _numbers(64, 32)
    embedding, head = (
        _embedding(kind, weight) for kind in (VocabParallelEmbedding, ParallelLMHead)
    )
    check = _check(tied=True, embed_tokens=embedding, lm_head=head)
    assert "lm_head.weight" in check.look({"embed_tokens.weight": weight}, "0").right
    state = {"embed_tokens.weight": weight, "lm_head.weight": _numbers(64, 32, seed=1)}
    assert _is_accepted(check.look(state, "1"))


def checkpoint_that_was_cut_short() -> None:
    """The worker starts all the same: vLLM may need none of its weights."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "model.safetensors"
        save_file({"norm.weight": torch.arange(4.0)}, file)
        file.write_bytes(file.read_bytes()[:-1])
        config = SimpleNamespace(model=folder, hf_text_config=SimpleNamespace())
        LoadedModel(torch.nn.Module(), config).look_at_checkpoint()


CASES = (
    bias_of_zeros_in_an_order_of_the_models_own,
    vector_cut_for_the_second_worker,
    convolution_whose_last_rows_are_replicated,
    weights_in_eight_bits,
    scales_of_a_linear_layer,
    embedding_with_old_weights_beside_new_packed_ones,
    packed_weights_with_a_nan,
    packed_layer_that_is_staged_transposed,
    queries_and_keys_fused_with_more,
    experts_of_the_second_worker_in_padded_tensors,
    quantised_experts,
    tied_head_that_is_staged_too,
    checkpoint_that_was_cut_short,
)

if __name__ == "__main__":
    for case in CASES:
        try:
            case()
        except Exception:  # noqa: BLE001 - told, and the test misses its line
            print(f"{case.__name__}:", flush=True)
            traceback.print_exc()
        else:
            print(f"CASE {case.__name__}", flush=True)
    print(f"CASES {len(CASES)}", flush=True)
