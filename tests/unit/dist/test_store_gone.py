"""A store whose host is gone is noticed in time by a rank that has yet to connect to it."""

import subprocess
import sys
import time
from datetime import timedelta

import pytest
import torch.distributed as dist
from trainsync.dist.agreement import Agreement
from trainsync.dist.errors import PeerLostError
from trainsync.dist.store import connect

HOST = """
import time, torch.distributed as dist
store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
print(store.port, flush=True)
time.sleep(600)
"""


def test_a_rank_that_begins_after_the_stores_host_was_killed_hears_of_it_in_time() -> None:
    host = subprocess.Popen([sys.executable, "-c", HOST], stdout=subprocess.PIPE, text=True)
    try:
        assert host.stdout is not None
        port = int(host.stdout.readline())
        store = dist.TCPStore("127.0.0.1", port, None, False, timeout=timedelta(seconds=100))
    finally:
        host.kill()
        host.wait()
    began = time.monotonic()
    with pytest.raises(PeerLostError, match="beginning to load: the store of the process group"):
        Agreement(connect(dist.PrefixStore("default", store)), 1, 2, 60)
    assert time.monotonic() - began < 30
