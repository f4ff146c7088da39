"""``trainsync checkpoints prune``: begin at `command`; `plan` says which steps go, `question` asks
first, `store` does the same for a run in object storage.
"""
