"""FSDP1, FSDP2 and plain modules: save, load, upload; `publish/` broadcasts.

Begin at `checkpoint_manager` (verl's FSDPCheckpointManager) or `state_dicts` (the `fsdp_*`
functions); `state` reads what a rank holds.
"""
