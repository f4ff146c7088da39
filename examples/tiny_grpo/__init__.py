"""A small transformer learns to sort digits by GRPO: trainsync's example, trained for real.

Begin at `train` (on Ray) or `train_torchrun`; `driver` has the loop, `policy/` the model.
"""
