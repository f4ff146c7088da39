"""Shards kept in memory through a death: a second place to load a committed checkpoint from.

A save writes each shard file to the volume or the store and, when the run keeps checkpoints in
memory, also into a memory file system, whose files outlive the process and go with the pod. `place`
says where, `kept` writes and drops, `decision` says what is dropped, `reuse` gives the memory of
what is dropped to the next file, `lookup` finds a file by the manifest's digest, `sweep` removes
what other runs left, `shared` asks the volume or the store for what processes must know of one
another.

No name is trusted: what a load takes from memory has the size and the digest that the manifest of
the committed step says. Anything else is as if it were not there.
"""
