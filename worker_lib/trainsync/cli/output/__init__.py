"""What every command prints: exit codes, tables, progress and safe text.

Begin at `console`; `tables`, `progress` and `text` each do one thing.
"""
