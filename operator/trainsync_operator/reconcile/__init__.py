"""One reconcile of one run: observe, decide, plan, apply, status.

Begin at `reconcile`; `attempts` and `failures` decide, `plan` lists the desired children, `apply`
writes the differences.
"""
