"""When trainers publish a version, and when explorers take it.

Begin at `policy` (pure rules of the four styles); `scheduler` keeps the books of a run, `loops` is
what a training loop and a rollout loop call.
"""
