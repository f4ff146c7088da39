"""Hypothesis profiles: equal examples in each run, or new ones on request.

A failure for a random example would block an unrelated change. So a plain run is repeatable, and
``HYPOTHESIS_PROFILE=search`` tries new examples, ten times as many in tests that set no number.
Examples have no deadline, since any example may be slow on a busy machine.
"""

import os

from hypothesis import HealthCheck, settings

_UNTIMED = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])

settings.register_profile("repeatable", _UNTIMED, derandomize=True)
settings.register_profile("search", _UNTIMED, max_examples=1000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "repeatable"))
