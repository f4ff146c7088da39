"""Where the parts of saves go: `base` says what a place can do, `volume` and `store` do it.

A pipeline, its part writers and its watch know `base` alone; `opening` chooses.
"""
