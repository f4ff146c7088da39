"""An explorer's calls: wait for a version, fetch it, load it, acknowledge it.

Begin at `client` (`async_client` for asyncio); `registration` holds its lease at the Synchronizer,
`loading` gives an engine the tensors.
"""
