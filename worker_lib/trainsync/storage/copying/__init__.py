"""Copies committed saves between places: volumes and stores, in any direction.

Begin at `copy` (the one loop over files, which digests on the way); `volume` and `store` are the
places, as sources and as destinations, and `places` what both have in common.
"""
