"""Publishes the weights of a training engine by the run's method.

Begin at `publisher`, which has the three methods; `gathered_upload` is a gathered `memory`,
`full_tensors` and `sharded_parts` give rank 0 the tensors to send.
"""
