"""Where the parts of saves go: `base` says what a place can do, `volume` does it on a volume.

A pipeline, its part writers and its watch know `base` alone.
"""
