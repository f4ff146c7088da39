"""Who may ask the monitor's process, and what its requests may ask of a core.

Begin at `middleware` (before all routes) and `auth`; `served_core` is the core as routes see it.
"""
