"""``python -m trainsync.agent``: a process beside an inference server that makes it follow a run.

Begin at `state` (what is decided), then `following` (what is done); `feed` tells of versions.
"""
