"""``trainsync checkpoints repair``: begin at `command`; `actions` carries out one action and says
so, `store` mends a run in object storage.
"""
