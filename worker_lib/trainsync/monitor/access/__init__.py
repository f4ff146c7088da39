"""Authorises requests to the monitor's process, and offers routes the calls of a core.

Begin at `middleware` (before all routes) and `auth`; `served_core` is the core as routes see it.
"""
