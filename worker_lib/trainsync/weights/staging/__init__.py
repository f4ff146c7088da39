"""A version that lies in shared memory, whole and verified, for the inference servers of a host.

Begin at `area` (the writer) and `reading` (a server's worker); `index` says what a version is,
`checkpoint` which versions a server's model takes.
"""
