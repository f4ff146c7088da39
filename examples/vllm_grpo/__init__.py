"""GRPO whose answers come from vLLM servers that follow the run.

Begin at ``README.md``; `train` has the loop, `demo` runs it without a cluster.
"""
