"""New weights from trainers to explorers.

Begin at `explorer/` (an explorer's calls) and `synchronizer/` (which explorer has which version);
`transports/` has one package for each way of the bytes, `pacing/` says when, `delta/` what changed.
`buckets/` packs tensors into blocks of one size, `staging/` prepares a version for an inference
server, `proof/` checks that the server computes with the version.
"""
