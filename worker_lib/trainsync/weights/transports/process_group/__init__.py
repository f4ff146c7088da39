"""From GPU to GPU: a torch process group of trainer and explorers, apart from that of training.

Begin at `generation` (one group, over once it has failed); `sending` and `receiving` are its ends,
`backend` makes the NCCL or gloo group, over a TCPStore whose prefix is HMAC-SHA256(token, "chain
group " + name). Rank 0 broadcasts in the stream's order.
"""
