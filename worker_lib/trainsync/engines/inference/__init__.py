"""New weights into an inference engine.

Begin at `base` (the two methods that an engine needs); `module`, `vllm` and `sglang` are the
adapters, on the caller's side; the part in vLLM's own processes is `trainsync.integrations.vllm`.
"""
