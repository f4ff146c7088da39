"""The Synchronizer: a Ray actor that knows versions and explorers, and holds no tensors.

Begin at `actor` (its calls) and `state` (the pure state machine); `roster` knows which explorers
live, `failover` makes the actor again when it dies.
"""
