"""The Synchronizer: a Ray actor that knows versions and explorers, and holds no tensors.

Begin at `actor` (its calls) and `state` (the pure state machine, of `roster` and the versions of
`weights.versions`); `followed_state` is the state in the actor, `failover` makes the actor again
from `failover_state`.
"""
