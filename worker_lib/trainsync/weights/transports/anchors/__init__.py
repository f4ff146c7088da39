"""Weights through a store (S3, GCS, Azure): whole versions now and then, deltas between.

The trainer puts objects under keys that no other process has, then moves a small index by a
conditional put: the version is published by that. An explorer needs the store alone, and may only
read. Not to be confused with Ray's object store (`object_store`). Begin at `index`; `routes` and
`retention` are pure; `publisher` is the trainer's side, `reader` and
`source` are the explorer's.
"""
