"""vLLM takes weights that trainsync staged in shared memory, by vLLM's own weight transfer.

Begin at `plugin`, vLLM's entry point, then `transfer`, the engine in each worker. vLLM's processes
import this package, with their own torch; the caller's side is `trainsync.engines.inference`.
"""
