"""The ways by which a version comes to an SGLang server, each with the same promises.

Begin at `base`; `disk` is the default, `tensor` hands buckets of tensors over in shared memory, and
`distributed` broadcasts them in a process group of the driver and the server's workers.
"""
