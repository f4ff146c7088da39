"""From GPU to GPU: a torch process group of trainer and explorers, apart from that of training.

Begin at `generation` (one group, over once it has failed); `sending` and `receiving` are its ends,
`backend` makes the NCCL or gloo group.
"""
