"""One engine on several hosts, each of which needs the weights in its own shared memory.

Begin at `leading`, the side of the agent beside the server; `staging` is the side of each other
host, whose agent has no server and is put together in `agent`.
"""
