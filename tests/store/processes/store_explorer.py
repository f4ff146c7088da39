"""An explorer that takes weights out of a store: ``store_explorer RAY NAME [pid]``.

Prints its own pid, if asked to. Then each version that it serves as JSON: number, digest of the
tensors, bytes by way.
"""

import hashlib
import json
import os
import sys
from typing import Any

os.environ["RAY_AUTH_MODE"] = "disabled"

import ray
import torch
from trainsync import RunContext


def digest(tensors: Any) -> str:
    """Of the bytes of (name, tensor) pairs, in the order of names."""
    hasher = hashlib.sha256()
    for name, tensor in sorted(tensors, key=lambda pair: str(pair[0])):
        hasher.update(name.encode())
        hasher.update(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return hasher.hexdigest()[:16]


def main() -> None:
    """See the module."""
    address, name, *says_pid = sys.argv[1:]
    if says_pid:
        print(os.getpid(), flush=True)
    ray.init(address=address, log_to_driver=False)
    version = -1
    with RunContext.from_env() as ctx:
        client = ctx.explorer(name)
        while (weights := client.wait_and_fetch(version)) is not None:
            version = weights.version
            row = [version, digest(weights.state_dict.items()), dict(weights.taken)]
            client.acknowledge(weights)
            print(json.dumps(row), flush=True)
        client.leave()
    ray.shutdown()


if __name__ == "__main__":
    main()
