"""Writes what was staged: shard files with digests taken on the way.

Begin at `writer`; `archive` and `state_pickle` reuse what is the same at every save.
"""
