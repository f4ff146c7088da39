"""Checks that a server takes the tensors of a draft model."""

from typing import Any, Final

_METHOD: Final = "draft_model"


def unfit_for_drafts(vllm_config: Any) -> str | None:
    """Why a server of this configuration takes no draft model; None: the server takes one."""
    speculative = vllm_config.speculative_config
    if speculative is None:
        return "the server has no draft model: start it with one in --speculative-config"
    if speculative.method != _METHOD:
        return f"the server drafts by {speculative.method}, expected {_METHOD}"
    if vllm_config.lora_config is not None:  # vLLM forgets adapters after a target's update alone
        return "the server has --enable-lora, beside which its draft model keeps its weights"
    if vllm_config.parallel_config.pipeline_parallel_size > 1:  # not every worker has a draft
        return "the server has pipeline stages, and its draft model keeps its weights"
    return None
