"""Sharded checkpoints: saved without stopping the trainer, and loaded verified.

Begin at `coordinator` (what a trainer calls); `save/`, `load/` and `merge/` do the work. `memory/`
keeps shards through a rank's death, `hub/` pushes a merged model to Hugging Face. The package
imports torch; `trainsync` itself does not import the package.
"""
