"""Where the parts of saves go: `base` says what a place can do, `volume` and `store` do it.

Begin at `base`, all that a pipeline, its part writers and its watch know; `opening` chooses.
"""
