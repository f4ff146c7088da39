"""Desired children of a run: one pure function and one file for each kind.

Begin at the kind that you change; `reconcile.plan` calls them.
"""
