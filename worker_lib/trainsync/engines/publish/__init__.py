"""Publishes the weights of a training engine by the run's method.

Begin at `publisher`; `broadcast` is the method `nccl`, `gathered_upload` a gathered `memory`,
`full_tensors` and `sharded_parts` give rank 0 the tensors to send.
"""
