"""LoRA weights: apart, alone or merged.

Begin at `adapters` (how verl keeps them); `merging` makes merged weights.
"""
