"""Megatron models: save, load, upload, broadcast.

Begin at `checkpoints` (whole checkpoints) or `state_dicts` (the `megatron_*` functions); `state`
reads what a rank holds, `layout` its place in the parallel dimensions.
"""
