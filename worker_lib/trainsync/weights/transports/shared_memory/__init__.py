"""Explorers on the trainer's host read its memory in place.

Begin at `sending` and `receiving`; `segment_store` keeps the trainer's segments, `segment_reader`
maps them at the explorer.
"""
