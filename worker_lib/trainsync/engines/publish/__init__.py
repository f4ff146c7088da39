"""Publishes the weights of a training engine by the run's method.

Begin at `publisher`, which has the three methods; `gathered_upload` is a gathered `memory`,
`sent_tensors` and `full_tensors` give rank 0 the tensors to send.
"""
