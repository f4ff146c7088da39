"""Adapters between trainsync and the training and inference engines.

Begin at `protocol` (`TrainingEngine`); `fsdp/`, `megatron/` and `verl/` save and load, `publish/`
sends weights, `inference/` loads weights, `checkpoints/` holds the code that the checkpoint
managers share.
"""
