"""The monitor's side of the Kubernetes API.

Begin at `client` (every call has a deadline); `lease` keeps one monitor of a run at work,
`run_reader` reads the TrainingRun.
"""
