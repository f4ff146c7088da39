"""A script that waits for a commit that never comes: ``python -m … DIRECTORY``."""

import asyncio
import signal
import sys

import trainsync

if __name__ == "__main__":
    # A shell starts commands in the background with SIGINT ignored, and children inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with trainsync.RunContext.from_env(sys.argv[1]) as ctx:
        coordinator = ctx.coordinator(0, 2)
        participants = trainsync.all_ranks("model", world_size=2)
        coordinator.register(1, checkpoint_participants=participants)
        print("waiting", flush=True)
        asyncio.run(coordinator.register_and_monitor(1))
