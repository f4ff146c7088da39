"""Which examples hypothesis tries: the same ones each time, or new ones on request.

A test that fails for an example drawn by chance would refuse a change that has nothing to do with
it. So a plain run is repeatable, and ``HYPOTHESIS_PROFILE=search`` looks for what nobody has seen,
with ten times as many examples where a test sets no number of its own.
"""

import os

from hypothesis import settings

settings.register_profile("repeatable", derandomize=True)
settings.register_profile("search", max_examples=1000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "repeatable"))
