"""Desired children of a run: one pure function and one file for each kind."""
