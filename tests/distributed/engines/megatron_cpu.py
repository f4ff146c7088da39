"""Megatron core and verl's real Megatron engine on a CPU: the patches to run without a GPU.

Import this only in a rank: the import takes seconds and patches torch and verl in the whole
process.
"""

import functools
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import torch

from tests.distributed.processes.forked import fork_instead_of_spawn
from tests.distributed.verl import verl_cpu

# CUDA functions that Megatron and mbridge call even without CUDA.
torch.cuda.current_device = lambda: torch.device("cpu")  # type: ignore[assignment,return-value]
torch.cuda.synchronize = lambda device=None: None
torch.cuda.get_rng_state = lambda device="cuda": torch.get_rng_state()
torch.cuda.set_rng_state = lambda state, device="cuda": None
torch.cuda.manual_seed = lambda seed: None
torch.nn.Module.cuda = lambda self, device=None: self  # type: ignore[assignment,method-assign]


def _on_cpu(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """For Megatron's optimizer, which makes some tensors on the device "cuda"."""

    @functools.wraps(make)
    def made(*args: Any, **kwargs: Any) -> torch.Tensor:
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = "cpu"
        return make(*args, **kwargs)

    return made


_type = torch.Tensor.type


def _type_on_cuda(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    """Megatron's optimizer also checks by type name that parameters are on CUDA."""
    found = _type(self, *args, **kwargs)
    if isinstance(found, str) and not found.startswith("torch.cuda."):
        return found.replace("torch.", "torch.cuda.", 1)
    return found


torch.tensor, torch.zeros = _on_cpu(torch.tensor), _on_cpu(torch.zeros)
torch.Tensor.type = _type_on_cuda  # type: ignore[method-assign]

import megatron.core.tensor_parallel.random as megatron_random  # noqa: E402
import verl.workers.engine.megatron.transformer_impl as megatron_engine  # noqa: E402
from mbridge import AutoBridge  # noqa: E402
from mbridge.core import register_model  # noqa: E402
from mbridge.models.qwen2 import Qwen2Bridge  # noqa: E402
from mbridge.models.qwen3moe import Qwen3MoEBridge  # noqa: E402
from megatron.core import parallel_state  # noqa: E402
from megatron.core.dist_checkpointing.strategies import (  # noqa: E402
    async_utils,
    filesystem_async,
)
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec  # noqa: E402
from megatron.core.transformer.moe.token_dispatcher import (  # noqa: E402
    MoEAlltoAllTokenDispatcher,
)
from verl.trainer.config import CheckpointConfig  # noqa: E402
from verl.workers.config import HFModelConfig, McoreEngineConfig, McoreOptimizerConfig  # noqa: E402

make_model = verl_cpu.make_model

megatron_random._get_cuda_rng_state = lambda *args, **kwargs: torch.get_rng_state()
megatron_random._set_cuda_rng_state = lambda *args, **kwargs: None
MoEAlltoAllTokenDispatcher.cuda_dtoh_stream = object()  # else a CUDA stream
# Else each rank starts two processes that import torch and Megatron anew: a writer of checkpoints,
# and the server of its results.
async_utils.mp = filesystem_async.mp = SimpleNamespace(get_context=fork_instead_of_spawn)

TRANSFORMER = {
    "use_cpu_initialization": True,
    "gradient_accumulation_fusion": False,
    "masked_softmax_fusion": False,
    "persist_layer_norm": False,
    "bias_dropout_fusion": False,
    "apply_rope_fusion": False,
    "sequence_parallel": False,
    "attention_backend": "local",
    "moe_grouped_gemm": False,
}


_NORM = {"input_layernorm.weight": ["model.layers.{layer_number}.input_layernorm.weight"]}


def _gpt_arguments(config: Any) -> dict[str, Any]:
    return {
        "vocab_size": config.vocab_size,
        "max_sequence_length": config.max_position_embeddings,
        "position_embedding_type": "rope",
        "rotary_base": config.rope_parameters["rope_theta"],
    }


@register_model("qwen2")
class LocalQwen2Bridge(Qwen2Bridge):
    """Layers without Transformer Engine, with separate norms."""

    _MLP_MAPPING: ClassVar = {
        **Qwen2Bridge._MLP_MAPPING,
        "pre_mlp_layernorm.weight": ["model.layers.{layer_number}.post_attention_layernorm.weight"],
    }
    _OTHER_MAPPING: ClassVar = _NORM

    def _get_transformer_layer_spec(self, vp_stage: int | None = None) -> Any:
        return get_gpt_layer_local_spec(normalization="RMSNorm")

    def _get_gptmodel_args(self) -> dict[str, Any]:
        return _gpt_arguments(self.hf_config)


@register_model("qwen3_moe")
class LocalQwen3MoEBridge(Qwen3MoEBridge):
    """Layers as in `LocalQwen2Bridge`, with Megatron's ``SequentialMLP``, which has a module for
    each expert; mbridge expects Transformer Engine's numbered weights."""

    _OTHER_MAPPING: ClassVar = _NORM

    def _get_transformer_layer_spec(self, vp_stage: int | None = None) -> Any:
        return get_gpt_layer_local_spec(
            num_experts=self.config.num_moe_experts,
            moe_grouped_gemm=False,
            qk_layernorm=True,
            normalization="RMSNorm",
        )

    def _get_gptmodel_args(self) -> dict[str, Any]:
        return _gpt_arguments(self.hf_config)

    def _weight_name_mapping_mcore_local_to_global(
        self, model: torch.nn.Module, consider_ep: bool = True
    ) -> dict[str, str]:
        first = 0
        if consider_ep:
            first = self.mpu.ep_rank * (self.config.num_moe_experts // self.mpu.ep_size)
        names = super()._weight_name_mapping_mcore_local_to_global(model, consider_ep=False)
        return {local: _numbered(name, first) for local, name in names.items()}


def _numbered(name: str, first: int) -> str:
    """``….experts.local_experts.1.linear_fc1.weight`` → ``….experts.linear_fc1.weight1``."""
    found = re.fullmatch(r"(.*\.experts\.)local_experts\.(\d+)\.(linear_fc\d\.weight)", name)
    return f"{found[1]}{found[3]}{first + int(found[2])}" if found else name


def make_experts(path: Path) -> None:
    """A random bfloat16 Qwen3 with four experts a layer, as a Hugging Face directory."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        moe_intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=16,
        num_experts=4,
        num_experts_per_tok=2,
        tie_word_embeddings=False,
    )
    Qwen3MoeForCausalLM(config).to(torch.bfloat16).save_pretrained(path)


def make_engine(
    model: Path,
    *,
    tp: int,
    contents: tuple[str, ...] = ("model", "extra"),
    external_lib: str | None = None,
    critic: bool = False,
) -> Any:
    """An initialised verl engine with Megatron's distributed AdamW. Use `train` to train: the
    forward and backward passes of Megatron's layers need a GPU.

    Args:
        critic: make an engine with a value head, in the layout of the actor made before.
    """
    kind = megatron_engine.MegatronEngineWithLMHead
    if critic:
        kind = megatron_engine.MegatronEngineWithValueHead
    else:
        parallel_state.destroy_model_parallel()  # that of an earlier layout
    engine = kind(
        model_config=HFModelConfig(
            **({"model_type": "value_model"} if critic else {}),
            path=str(model),
            external_lib=external_lib,
            use_remove_padding=False,
        ),
        engine_config=McoreEngineConfig(
            tensor_model_parallel_size=tp,
            vanilla_mbridge=True,
            use_remove_padding=False,
            use_dynamic_bsz=False,
            sequence_parallel=False,
            override_transformer_config=dict(TRANSFORMER),
        ),
        optimizer_config=McoreOptimizerConfig(
            lr=1e-2,
            lr_warmup_steps=2,
            total_training_steps=10,
            use_checkpoint_opt_param_scheduler=True,
        ),
        checkpoint_config=CheckpointConfig(
            save_contents=list(contents), load_contents=list(contents), async_save=True
        ),
    )
    engine.initialize()
    return engine


def train(engine: Any, step: int) -> None:
    """Take a step of optimizer and schedule, with gradients that depend on the step."""
    generator = torch.Generator().manual_seed(step)
    for chunk in engine.module:
        for parameter in chunk.parameters():
            parameter.main_grad.copy_(torch.randn(parameter.shape, generator=generator))
    done, _, _ = engine.optimizer.step()
    assert done
    engine.lr_scheduler.step(1)


def own_steps(engine: Any) -> None:
    """Call after the engine's own load: without Transformer Engine, Megatron's optimizer then
    shares one step count between all parameters, and each parameter's step raises it."""
    for optimizer in engine.optimizer.chained_optimizers:
        for state in optimizer.optimizer.state.values():
            state["step"] = state["step"].clone()


def make_trained(
    model: Path,
    *,
    tp: int = 1,
    pp: int = 1,
    ep: int = 1,
    etp: int | None = None,
    load: bool = True,
    **settings: Any,
) -> Any:
    """Megatron core with mbridge, without verl, as a `TrainedMegatron`.

    Args:
        settings: fields of Megatron's ``TransformerConfig``.
    """
    from trainsync import TrainedMegatron
    from transformers import AutoConfig

    parallel_state.destroy_model_parallel()  # that of an earlier layout
    parallel_state.initialize_model_parallel(
        tp, pp, expert_model_parallel_size=ep, expert_tensor_parallel_size=etp
    )
    config = AutoConfig.from_pretrained(str(model))
    bridge = AutoBridge.from_config(config, dtype=torch.bfloat16)
    bridge.set_extra_args(**TRANSFORMER, **settings)
    module = bridge.get_model(weight_path=str(model) if load else None, bf16=True)
    return TrainedMegatron(module, bridge)
