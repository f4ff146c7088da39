"""Publishes the weights of a training engine by the run's method.

Begin at `publisher` (the three methods) and `model_update_group` (`nccl`); `gathering` lets ranks
gather with a deadline, `sent_tensors` has what rank 0 sends, `gathered_upload` a gathered `memory`,
`state_dicts` the parts that FSDP and Megatron share.
"""
