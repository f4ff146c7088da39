"""Makes a Hugging Face model directory out of a committed step.

Begin at `merge`; `weights` puts tensors together, `names` names them, `safetensors` writes them;
`megatron` and `megatron_names` do the same for Megatron's shards.
"""
