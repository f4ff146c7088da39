"""A local run that claims, reports the claim, and waits to be killed: ``python -m … DIRECTORY``."""

import sys
import time

from trainsync.runtime.context import RunContext

if __name__ == "__main__":
    context = RunContext.from_env(sys.argv[1])
    print(context.attempt, flush=True)
    time.sleep(120)
