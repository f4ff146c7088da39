"""The explorer of a pool that sees nothing but a bucket.

``python -m tests.bench.weights.peers.store_pool URL ENDPOINT`` reads JSON lines [version, digest,
bytes], as a Synchronizer would tell it, and answers each with a line when the version is whole and
verified, and with another one when it is ready for the next.
"""

import json
import sys

import torch
from trainsync.storage.objects.opening import StoreOptions, open_store
from trainsync.weights.transports.anchors.source import StoreSource
from trainsync.weights.versions import Published

SECONDS = 600.0


def say(**words: object) -> None:
    """Answer."""
    print(json.dumps(words), flush=True)


def main() -> None:
    """Stage versions until the input ends."""
    url, endpoint = sys.argv[1:]
    torch.set_num_threads(1)
    source = StoreSource(open_store(url, StoreOptions(endpoint=endpoint, allow_http=True)))
    say(begun=True)
    for line in sys.stdin:
        version, digest, size = json.loads(line)
        weights = source.fetch(Published.stored(version, digest, size), SECONDS)
        say(version=version, seconds=weights.seconds, bytes=weights.bytes)
        source.copied(weights)
        source.wait_ready(SECONDS)
        say(ready=version)
    source.close()


if __name__ == "__main__":
    main()
