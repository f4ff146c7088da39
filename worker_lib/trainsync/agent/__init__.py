"""``python -m trainsync.agent``: keeps an inference server on its run's newest committed weights.

Begin at `state` (decisions, and why a server is not ready), then `following` (fetch, stage, update,
prove). `feeds/` tell of versions, `admission/` lets no request reach unproven weights.
"""
