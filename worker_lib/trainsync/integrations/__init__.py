"""trainsync in third-party trainers, switched on by the trainer's own configuration.

Begin at `verl` or `vllm`: a package for each.
"""
