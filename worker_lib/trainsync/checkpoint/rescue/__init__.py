"""A small process outlives each rank, and writes what the rank had in memory when it died.

Begin at `rescuer` (of the rank); `process` is the other side of the socket, `messages` what goes
through, `finish` writes a part, and `waiting` lets a restart wait for parts that are on their way.
`guests` reports copies of a neighbour's parts, `copies` writes parts from them.
"""
