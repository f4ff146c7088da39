"""Writes what was staged: shard files with digests taken on the way.

Begin at `writer`; `stream` takes the digest, `dumping` makes a state into bytes.
"""
