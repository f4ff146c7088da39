"""Sharded checkpoints: saved without stopping the trainer, and loaded verified.

Begin at `coordinator` (what a trainer calls); `save/`, `load/` and `merge/` do the work. The
package imports torch; `trainsync` itself does not import the package.
"""
