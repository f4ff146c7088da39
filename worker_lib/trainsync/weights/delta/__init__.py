"""Deltas between two versions of the same bytes: lossless.

Begin at `codec`; `base` is the trainer's copy of the last version, `kernel` has the compiled
loops, `wire` sends a delta over the chain.
"""
