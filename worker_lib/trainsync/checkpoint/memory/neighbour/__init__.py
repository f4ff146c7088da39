"""A copy of each kept file in the memory of another node, and loads from there.

Begin at `neighbour` (a rank that saves: sends copies and takes them) and `fetching` (ranks that
load). `copying` sends, `roster` chooses the partner, `pace` limits the rate, `serving` answers, and
`wire` and `secret` are the protocol and its key.
"""
