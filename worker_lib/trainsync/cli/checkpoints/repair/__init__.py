"""``trainsync checkpoints repair``: begin at `command`; `actions` carries out one action and says
so, `store` repairs a run in object storage.
"""
