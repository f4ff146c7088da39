"""Proof that a server computes with the version that it says it serves.

Begin at `asking` (the trainer's log-probabilities of canary prompts) and `comparing` (a server's
beside them); `record` is what travels with the version, `products` tells what layers compute with.
"""
