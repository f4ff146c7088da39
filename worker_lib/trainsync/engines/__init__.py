"""What trainsync knows of training engines and inference engines.

Begin at `protocol` (`TrainingEngine`); `fsdp/`, `megatron/` and `verl/` save and load, `publish/`
sends weights, `inference/` takes them, `checkpoints/` is what checkpoint managers share.
"""
