"""Agents pass versions on to one another, so that few of them read the volume or the store.

Begin at `reader` (committed versions) or `objects` (of a store): `fetching` reads a file from the
agent before, and `sharing` gives the file on while its bytes still come.
"""
