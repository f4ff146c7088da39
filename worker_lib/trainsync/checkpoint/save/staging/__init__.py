"""Copies of a state that later optimizer steps cannot change.

Begin at `staging`; `buffers` are the reused memory, `overlap` copies behind the trainer, `pytree`
walks a nested state.
"""
