"""GRPO whose answers come from vLLM servers that follow the run; see README.md."""
