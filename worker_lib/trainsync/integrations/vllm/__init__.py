"""vLLM takes weights that trainsync staged in shared memory, by vLLM's own weight transfer.

`plugin` is vLLM's entry point, `transfer` the engine in each worker. Imported by vLLM's processes,
with their version of torch.
"""
