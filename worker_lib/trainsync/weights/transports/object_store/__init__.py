"""The method `memory`: ranks upload their parts, explorers read them from Ray's object store.

Begin at `upload` (trainer) and `fetcher` (explorer); `packing` makes a rank's buckets, `assemble`
makes full tensors of them.
"""
