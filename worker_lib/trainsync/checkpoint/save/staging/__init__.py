"""Copies of a state that later optimizer steps cannot change.

Begin at `area`: `buffers` are the reused memory, `staging` is the copy, `overlap` a copy behind the
trainer, `pytree` walks a nested state.
"""
