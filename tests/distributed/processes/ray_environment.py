"""What Ray reads from the environment as it is imported: import this module before, in tests."""

import os

# A leftover thread that calls Ray after a module's `ray.shutdown` would start another Ray, which
# would end this process a minute after the next module's shutdown.
os.environ["RAY_ENABLE_AUTO_CONNECT"] = "0"
# Otherwise the first Ray makes a token in the home directory and requires it of processes without
# the token.
os.environ["RAY_AUTH_MODE"] = "disabled"
# Ray's workers are nice by default, and beside other tests would wait past their deadlines.
os.environ["RAY_worker_niceness"] = "0"  # noqa: SIM112 - as Ray reads it
# Else each Ray starts a worker for each of its processors, of which most stay idle: a second of
# processor for each.
os.environ["RAY_prestart_worker_first_driver"] = "0"  # noqa: SIM112 - as Ray reads it
# In Ray 2.60, each `ray.shutdown` but the first leaves its metrics thread running. An export during
# the exit crashes this process after all tests have passed.
os.environ["RAY_enable_open_telemetry"] = "0"  # noqa: SIM112 - as Ray reads it
