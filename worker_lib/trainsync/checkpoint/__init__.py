"""Sharded checkpoints: saved without stopping the trainer, and loaded verified.

Begin at `coordinator` (what a trainer calls); `save/`, `load/` and `merge/` do the work. `memory/`
keeps shards through a rank's death, `rescue/` finishes the saves of a rank that was killed, `hub/`
pushes a merged model to Hugging Face. The package imports torch; `trainsync` itself does not import
the package.
"""
