"""What is learned and how: the task, the model, its answers, and GRPO's arithmetic.

Begin at `task` and `grpo`. Nothing here knows of processes or of trainsync.
"""
