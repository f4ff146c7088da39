"""Starts a Ray of this machine alone."""

from typing import Any


def start_ray(**options: Any) -> Any:
    """`ray.init` of a new Ray without a dashboard; returns its context.

    Ray gives its own node 30 s to start, whatever is asked for. On two cores that start three at
    once this is too little now and then, so a second try is made.
    """
    import ray

    options = {"address": "local", "include_dashboard": False, **options}
    try:
        return ray.init(**options)
    except Exception as error:
        if "timed out during startup" not in str(error):
            raise
    ray.shutdown()
    return ray.init(**options)
