"""An explorer's calls: wait for a version, fetch it, load it, acknowledge it.

Begin at `client` (`async_client` for asyncio), which also gives an engine the tensors;
`synchronizer.connection` holds its lease.
"""
