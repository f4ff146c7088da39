"""vLLM takes weights that trainsync staged in shared memory, by vLLM's own weight transfer.

Begin at `plugin`, vLLM's entry point; `transfer` is the engine in each worker, `loaded_model` what
it does with one model, `preparing` and `twin` what it does before a pause. Imported by vLLM's
processes, with their version of torch; the caller's side is `trainsync.engines.inference`.
"""
