"""A run that saves straight into a store, with no volume: the records beside its commits.

Begin at `names` (where everything is), then `term` (who may commit, and how) and `records` (what
participants and the monitor say of a save). `upload` uploads bytes while they are made.
"""
