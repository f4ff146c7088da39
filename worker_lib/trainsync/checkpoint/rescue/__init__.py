"""What a rank has in memory when it dies is written by a small process that outlives the rank.

    rank: shard file in memory → told to the process → volume or store → receipt
    rank dies between → the process writes the rest of it, as the very same save

So a save that all ranks had in memory is committed, although they were killed. Where a pod is lost
with that process, the process of the rank's neighbour writes the part from its copy, once asked.

Begin at `rescuer` (of the rank); `process` is the other side of the socket, `messages` what goes
through, `finish` writes a part, and `waiting` lets a restart wait for parts that are on their way,
and asks for copies. `guests` tells of a neighbour's copies, `copies` writes parts from those.
Nothing here imports torch: the process is small, and starts fast.
"""
