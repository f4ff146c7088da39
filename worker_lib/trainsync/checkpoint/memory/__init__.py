"""Shards kept in memory through a death: a second place to load a committed checkpoint from.

Begin at `kept`, which writes the files of a process and drops them as `decision` says; `lookup`
finds them at a load. `place` says where they are, `reuse` gives freed memory to the next file,
`sweep` removes what other runs left, and `shared` is what processes must know of one another.
"""
