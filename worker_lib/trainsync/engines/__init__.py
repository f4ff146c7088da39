"""Adapters between trainsync and the training and inference engines.

Begin at `protocol` (`TrainingEngine`); `fsdp/`, `megatron/` and `verl/` save and load, `publish/`
sends weights, `inference/` loads weights in the explorer's process, `servers/` has vLLM and SGLang
load weights over HTTP. `checkpoints/` holds the code that the checkpoint managers share, `lora/`
merges adapters, `hf/` writes models as transformers reads them.
"""
