"""Megatron models: save, load, upload, broadcast.

Begin at `saving` and `loading` (whole checkpoints), `checkpoints` (verl's) or `state_dicts` (the
other `megatron_*` functions); `state` reads what a rank holds, `layout` its place in the parallel
dimensions.
"""
