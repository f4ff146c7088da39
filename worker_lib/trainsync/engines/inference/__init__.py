"""New weights into an inference engine.

Begin at `base` (the two methods that an engine needs); `module`, `vllm` and `sglang` are the
adapters.
"""
