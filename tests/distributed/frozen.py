"""Imported last by the server of `tests.distributed.forked`: what it has is left out of collections
of garbage, each of which would copy and look through all of torch in each forked process."""

import gc

gc.collect()
gc.freeze()
