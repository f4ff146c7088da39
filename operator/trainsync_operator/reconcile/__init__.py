"""One reconcile of one run: observe, decide, plan, apply, status.

Begin at `reconcile`; decide/ says what happens next, `plan` lists the desired children, apply/
writes the differences, servers/ does both for inference servers, and `reports` tells how it went.
"""
