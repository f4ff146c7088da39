"""The output that all commands share: exit codes, tables, progress and safe text.

Begin at `console`; `tables`, `progress` and `text` each do one thing.
"""
