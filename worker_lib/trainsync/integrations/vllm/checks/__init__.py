"""Checks of the weights that vLLM has loaded, and of adapters and draft models before a load.

Begin at `layers`, which compares rows with the staged ones by `shards` and `experts`.
"""
