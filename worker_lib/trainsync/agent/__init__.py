"""``python -m trainsync.agent``: keeps an inference server on its run's newest committed weights.

Begin at `state` (decisions, and why a server is not ready), then `following` (fetch, stage, update,
prove); `feed` tells of versions: of the monitor (`rendezvous/`), a directory or a bucket.
`fellows/` fetches from other agents, `admission/` lets no request reach unproven weights.
"""
