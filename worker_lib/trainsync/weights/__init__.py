"""New weights from trainers to explorers.

Begin at `explorer/` (an explorer's calls) and `synchronizer/` (which explorer has which version);
`transports/` has one package for each way of the bytes, `pacing/` says when, `delta/` what changed.
"""
