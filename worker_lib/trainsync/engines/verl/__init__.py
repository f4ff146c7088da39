"""verl's training engines as `TrainingEngine`.

Begin at `install` (lets an engine save and load through a run) and `adapters`; `offload` makes
offloaded weights readable.
"""
