"""LoRA weights: base and adapter, adapter alone, or merged.

Begin at `adapters` (verl's format); `merging` makes merged weights.
"""
