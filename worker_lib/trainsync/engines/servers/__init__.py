"""Inference servers that are driven over HTTP: new weights between pause and resume.

Begin at `base` (what a driver does); `vllm` is the driver of a ``vllm serve``, `sglang` that of an
SGLang server, and `kinds` makes one of them.
"""
