"""Names and weights in Hugging Face of what Megatron holds fused, by mbridge."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from trainsync.checkpoint.errors import MergeError
from trainsync.checkpoint.merge.megatron_names import HuggingFaceNames


def qwen2(**options: Any) -> Any:
    from transformers import Qwen2Config

    return Qwen2Config(
        vocab_size=10,
        hidden_size=8,
        intermediate_size=6,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        **options,
    )


def test_fused_attention_is_cut_by_groups_of_heads() -> None:
    names = HuggingFaceNames(qwen2())
    # Of each of the two groups: two queries, a key, a value, of two rows each.
    fused = torch.arange(16).repeat_interleave(8).reshape(16, 8)
    made = dict(names.convert("decoder.layers.self_attention.linear_qkv.weight", (1,), fused))
    rows = {name.split(".")[-2]: tensor[:, 0].tolist() for name, tensor in made.items()}
    assert rows == {
        "q_proj": [0, 1, 2, 3, 8, 9, 10, 11],
        "k_proj": [4, 5, 12, 13],
        "v_proj": [6, 7, 14, 15],
    }
    assert all(name.startswith("model.layers.1.self_attn.") for name in made)


def test_gate_and_up_norms_and_the_vocabulary_have_their_names() -> None:
    names = HuggingFaceNames(qwen2())
    fused = torch.arange(12).reshape(12, 1).expand(12, 8)
    gate, up = names.convert("decoder.layers.mlp.linear_fc1.weight", (0,), fused)
    assert gate[0] == "model.layers.0.mlp.gate_proj.weight"
    assert up[1][:, 0].tolist() == [6, 7, 8, 9, 10, 11]
    norm = torch.ones(8)
    [(name, _)] = names.convert("decoder.layers.mlp.linear_fc1.layer_norm_weight", (1,), norm)
    assert name == "model.layers.1.post_attention_layernorm.weight"
    [(name, rows)] = names.convert("embedding.word_embeddings.weight", (), torch.ones(12, 8))
    assert (name, rows.shape) == ("model.embed_tokens.weight", (10, 8))  # two rows were padding


def test_experts_have_names_of_their_own() -> None:
    from transformers import Qwen3MoeConfig

    config = Qwen3MoeConfig(
        vocab_size=10,
        hidden_size=8,
        moe_intermediate_size=6,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_experts=4,
        num_experts_per_tok=2,
    )
    names = HuggingFaceNames(config)
    key = "decoder.layers.mlp.experts.experts.linear_fc1.weight"
    gate, up = names.convert(key, (1, 3), torch.ones(12, 8))
    assert gate[0] == "model.layers.1.mlp.experts.3.gate_proj.weight"
    assert up[0] == "model.layers.1.mlp.experts.3.up_proj.weight"
    norm = torch.ones(8)
    [(name, _)] = names.convert("decoder.layers.mlp.linear_fc1.layer_norm_weight", (0,), norm)
    assert name == "model.layers.0.post_attention_layernorm.weight"


def test_layers_that_differ_are_numbered_in_keys_and_their_experts_beside() -> None:
    from transformers import Glm4MoeConfig

    config = Glm4MoeConfig(
        vocab_size=10,
        hidden_size=8,
        intermediate_size=6,
        moe_intermediate_size=6,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=2,
        n_routed_experts=4,
        num_experts_per_tok=2,
        first_k_dense_replace=1,
    )
    names = HuggingFaceNames(config)
    fused = torch.ones(12, 8)
    gate, _ = names.convert("decoder.layers.0.mlp.linear_fc1.weight", (), fused)
    assert gate[0] == "model.layers.0.mlp.gate_proj.weight"
    key = "decoder.layers.1.mlp.experts.experts.linear_fc1.weight"
    gate, up = names.convert(key, (3,), fused)
    assert gate[0] == "model.layers.1.mlp.experts.3.gate_proj.weight"
    assert up[0] == "model.layers.1.mlp.experts.3.up_proj.weight"


def test_tied_weights_of_one_model_change_no_other() -> None:
    HuggingFaceNames(qwen2(tie_word_embeddings=True))
    names = HuggingFaceNames(qwen2(tie_word_embeddings=False))
    [(name, _)] = names.convert("output_layer.weight", (), torch.ones(10, 8))
    assert name == "lm_head.weight"


def test_what_mbridge_does_not_know_is_refused_by_name() -> None:
    names = HuggingFaceNames(qwen2())
    with pytest.raises(MergeError, match=r"cannot turn decoder\.layers\.0\.mystery\.weight of a q"):
        names.convert("decoder.layers.mystery.weight", (0,), torch.ones(8))
    from transformers import GPT2Config

    with pytest.raises(MergeError, match="does not know models of type 'gpt2'; expected one of"):
        HuggingFaceNames(GPT2Config())


def test_a_configuration_that_mbridge_cannot_read_is_refused() -> None:
    config = SimpleNamespace(model_type="qwen2", num_hidden_layers=2)
    with pytest.raises(MergeError, match=r"'qwen2', but not as .* no attribute 'hidden_size'"):
        HuggingFaceNames(config)
