"""Container images without a container engine, and the Python environment of Ray pods.

Begin at `build` (recipes of the images); `layers` packs files, `pod_env` makes the environment.
"""
