"""One engine on several hosts: each of them needs the weights in its own shared memory.

The agent beside the server leads (`leading`): it says which version it brings, and updates the
server when each other host has that version. There an agent without a server stages what the
leading one says (`staging`, put together in `agent`). Both only ask one another: no request changes
anything.
"""
