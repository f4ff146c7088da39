"""`make demo`: a real TrainingRun on a real cluster, with a killed trainer and checked promises.

Begin at `cli` and `play`; `faults` kills, `promises` checks, `view` is what a person sees.
"""
