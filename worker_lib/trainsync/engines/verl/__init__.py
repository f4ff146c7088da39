"""verl's training engines as `TrainingEngine`.

Begin at `install` (lets an engine save and load through a run) and `adapters`; `offload` brings
offloaded weights to where they can be read.
"""
