"""Refuses requests in a process that was forked after its parent had made some.

obstore's threads are those of the parent: in the child each request would wait for ever.
"""

import os

from trainsync.storage.objects.errors import StoreRefusedError

_used = False
_lost_its_threads = False


def check(name: str) -> None:
    """Pass, and remember that this process makes requests.

    Args:
        name: of the store, for the message.

    Raises:
        StoreRefusedError: the process that this one was forked from had made requests.
    """
    global _used
    if _lost_its_threads:
        raise StoreRefusedError(
            f"{name}: process {os.getpid()} was forked from one that had used a store, and has "
            "none of its threads: start it with spawn or forkserver"
        )
    _used = True


def _after_in_child() -> None:
    global _lost_its_threads
    _lost_its_threads = _used


os.register_at_fork(after_in_child=_after_in_child)
