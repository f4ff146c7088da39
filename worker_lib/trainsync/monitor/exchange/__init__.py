"""Calls of the Synchronizer between two Ray clusters of a run, by way of the monitor.

Begin at `calls`; `routes` are its requests.
"""
