"""Agents pass a version's files on to one another, so that few of them read the volume.

Begin at `reader`: a file comes from the agent before (`fetching`), while the one behind reads it
already (`holding`, `sharing`). `order` says which agent is before which; `registry` hears of them.
"""
