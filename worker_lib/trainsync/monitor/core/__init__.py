"""The core: the ledger of a run on a volume, with the requests and ticks that change it.

Begin at `core` (every request enters there, those about saves through `save_requests`);
`core_thread` is the one thread that owns it, `views` is what status, Events and metrics see of it.
"""
