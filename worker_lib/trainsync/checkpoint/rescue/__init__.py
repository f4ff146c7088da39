"""What a rank has in memory when it dies is written by a small process that outlives the rank.

Begin at `rescuer` (of the rank); `process` is the other side of the socket, `messages` what goes
through, `finish` writes a part, and `waiting` lets a restart wait for parts that are on their way.
`guests` reports copies of a neighbour's parts, `copies` writes parts from them.
"""
