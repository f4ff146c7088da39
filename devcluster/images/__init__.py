"""Container images without a container engine: pack them, and load them into the nodes.

Begin at `images` (which images there are); `ociimage` packs, `imageload` loads.
"""
