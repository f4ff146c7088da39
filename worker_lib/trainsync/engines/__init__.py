"""Thin adapters from training engines to the checkpoint and weights packages."""
