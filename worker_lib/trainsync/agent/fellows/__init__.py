"""Agents pass versions on to one another, so that few of them read the volume or the store.

Begin at `reader` (committed versions: `versions` has their files) or `objects` (of a store): a file
comes from the agent before (`fetching`), while the one behind reads it already (`holding`,
`sharing`). `order` says which agent is before which; `registry` hears of them.

A connection carries one file. It begins with the handshake of a broadcast's control line
(`trainsync.weights.transports.broadcast`), with the token HMAC-SHA256(the monitor's key, "chain
fellows") and ``hello {version, file, offset}``, a place in the manifest's files; after the welcome
come 0x06 and the file's bytes without frames. An object of a store is a version of one file, whose
path is the object's key.
"""
