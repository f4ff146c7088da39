"""verl on trainsync, by verl's own configuration.

Begin at the two modules that verl loads, each of which works alone: `backend` sends weights to
rollouts, `checkpoints` saves and loads through the run.
"""
