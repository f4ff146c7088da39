"""Copies of a state that later optimizer steps cannot change.

Begin at `area`, the reused memory; `staging` is the copy, `overlap` a copy behind the trainer,
`pytree` walks a nested state.
"""
