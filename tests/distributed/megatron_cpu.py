"""Megatron core, and verl's real Megatron engine, on a CPU: what they need to run without a GPU.

Import this only in a rank: it takes seconds, and changes torch and verl for the whole process.
"""

from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import torch

from tests.distributed import verl_cpu  # sets verl's platform: import it first

# What Megatron and mbridge ask of CUDA, whether there is any or not.
torch.cuda.current_device = lambda: torch.device("cpu")  # type: ignore[assignment,return-value]
torch.cuda.synchronize = lambda device=None: None
torch.cuda.get_rng_state = lambda device="cuda": torch.get_rng_state()
torch.cuda.set_rng_state = lambda state, device="cuda": None
torch.cuda.manual_seed = lambda seed: None
torch.nn.Module.cuda = lambda self, device=None: self  # type: ignore[assignment,method-assign]

import megatron.core.tensor_parallel.random as megatron_random  # noqa: E402
import verl.workers.engine.megatron.transformer_impl as megatron_engine  # noqa: E402
from mbridge import AutoBridge  # noqa: E402
from mbridge.core import register_model  # noqa: E402
from mbridge.models.qwen2 import Qwen2Bridge  # noqa: E402
from megatron.core import parallel_state  # noqa: E402
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec  # noqa: E402
from verl.trainer.config import CheckpointConfig  # noqa: E402
from verl.utils.checkpoint.megatron_checkpoint_manager import (  # noqa: E402
    MegatronCheckpointManager,
)
from verl.workers.config import HFModelConfig, McoreEngineConfig, McoreOptimizerConfig  # noqa: E402

make_model = verl_cpu.make_model

megatron_random._get_cuda_rng_state = lambda *args, **kwargs: torch.get_rng_state()
megatron_random._set_cuda_rng_state = lambda *args, **kwargs: None

TRANSFORMER = {
    "use_cpu_initialization": True,
    "gradient_accumulation_fusion": False,
    "masked_softmax_fusion": False,
    "persist_layer_norm": False,
    "bias_dropout_fusion": False,
    "apply_rope_fusion": False,
    "sequence_parallel": False,
    "attention_backend": "local",
}


@register_model("qwen2")
class LocalQwen2Bridge(Qwen2Bridge):
    """Layers without Transformer Engine, whose norms lie apart."""

    _MLP_MAPPING: ClassVar = {
        **Qwen2Bridge._MLP_MAPPING,
        "pre_mlp_layernorm.weight": ["model.layers.{layer_number}.post_attention_layernorm.weight"],
    }
    _OTHER_MAPPING: ClassVar = {
        "input_layernorm.weight": ["model.layers.{layer_number}.input_layernorm.weight"]
    }

    def _get_transformer_layer_spec(self, vp_stage: int | None = None) -> Any:
        return get_gpt_layer_local_spec(normalization="RMSNorm")

    def _get_gptmodel_args(self) -> dict[str, Any]:
        rope = self.hf_config.rope_parameters
        return {
            "vocab_size": self.hf_config.vocab_size,
            "max_sequence_length": self.hf_config.max_position_embeddings,
            "position_embedding_type": "rope",
            "rotary_base": rope["rope_theta"],
        }


def make_engine(model: Path, *, tp: int, contents: tuple[str, ...] = ("model", "extra")) -> Any:
    """An initialised ``MegatronEngineWithLMHead`` that only infers: Megatron's optimizer needs
    CUDA. Its checkpoint manager, which verl leaves out then, is verl's own too."""
    saves = CheckpointConfig(
        save_contents=list(contents), load_contents=list(contents), async_save=True
    )
    engine = megatron_engine.MegatronEngineWithLMHead(
        model_config=HFModelConfig(path=str(model), use_remove_padding=False),
        engine_config=McoreEngineConfig(
            tensor_model_parallel_size=tp,
            vanilla_mbridge=True,
            forward_only=True,
            use_remove_padding=False,
            use_dynamic_bsz=False,
            sequence_parallel=False,
            override_transformer_config=dict(TRANSFORMER),
        ),
        optimizer_config=McoreOptimizerConfig(lr=1e-2),
        checkpoint_config=saves,
    )
    engine.initialize()
    engine.checkpoint_mananager = MegatronCheckpointManager(
        config=SimpleNamespace(model=SimpleNamespace(path=str(model))),
        checkpoint_config=saves,
        model_config=engine.model_config.hf_config,
        transformer_config=engine.tf_config,
        role="actor",
        model=engine.module,
        arch=engine.model_config.architectures[0],
        hf_config=engine.model_config.hf_config,
        param_dtype=engine.param_dtype,
        share_embeddings_and_output_weights=False,
        processing_class=engine.model_config.get_processor(),
        optimizer=None,
        optimizer_scheduler=None,
        use_distributed_optimizer=False,
        use_dist_checkpointing=False,  # as the engine's configuration says
        bridge=engine.bridge,
        provider=None,
    )
    return engine


def make_trained(model: Path, *, tp: int = 1, pp: int = 1, load: bool = True) -> Any:
    """Megatron core alone, with mbridge, as a `TrainedMegatron`."""
    from trainsync import TrainedMegatron
    from transformers import AutoConfig

    parallel_state.initialize_model_parallel(tp, pp)
    config = AutoConfig.from_pretrained(str(model))
    bridge = AutoBridge.from_config(config, dtype=torch.bfloat16)
    bridge.set_extra_args(**TRANSFORMER)
    module = bridge.get_model(weight_path=str(model) if load else None, bf16=True)
    return TrainedMegatron(module, bridge)
