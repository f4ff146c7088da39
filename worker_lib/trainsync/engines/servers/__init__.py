"""Inference servers that are driven over HTTP: new weights between pause and resume.

Begin at `base`: what a driver does, and an example of its use. `vllm` and `sglang` are the drivers
of those servers, `kinds` makes one of them, and `proving` proves which version a server has.
"""
