"""Hugging Face files beside the shards.

Begin at `config` (the small files); `export` writes the whole model.
"""
