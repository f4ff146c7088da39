"""Lossless binary differences between two versions of the weights.

Begin at `codec`; `base` is the trainer's copy of the last version, `kernel` has the compiled
loops. `transports.chain.delta_wire` sends a delta.
"""
