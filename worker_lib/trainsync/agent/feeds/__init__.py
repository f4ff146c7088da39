"""Feeds tell an agent of versions: from a run's directory, its bucket, or a store of versions.

Begin at `base`, the protocol; `directory`, `commits` and `store` are the three feeds.
"""
