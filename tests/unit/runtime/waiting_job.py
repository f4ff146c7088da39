"""A script that waits for a commit that never comes: ``python -m … DIRECTORY``."""

import asyncio
import sys

import trainsync

if __name__ == "__main__":
    with trainsync.RunContext.from_env(sys.argv[1]) as ctx:
        coordinator = ctx.coordinator(0, 2)
        everyone = trainsync.all_ranks("model", world_size=2)
        coordinator.register(1, checkpoint_participants=everyone)
        print("waiting", flush=True)
        asyncio.run(coordinator.register_and_monitor(1))
