"""Saving sharded checkpoints without stopping the trainer: staging, writing, coordinating, loading.

This package imports torch; `trainsync` itself does not import this package.
"""
