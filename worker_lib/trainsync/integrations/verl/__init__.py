"""verl on trainsync, by verl's own configuration.

`trainsync.integrations.verl.backend` sends weights to rollouts, and
`trainsync.integrations.verl.checkpoints` saves and loads through the run. Each works alone.
"""
