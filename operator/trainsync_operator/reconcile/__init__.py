"""One run, brought one step further: observe, decide, plan, apply, status.

Begin at `reconcile`; `attempts` and `failures` decide, `plan` says what must exist, `apply` makes
it so.
"""
