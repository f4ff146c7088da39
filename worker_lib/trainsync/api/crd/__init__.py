"""The CustomResourceDefinition of the TrainingRun: ``python -m trainsync.api.crd`` prints it.

Begin at `generate` (a structural schema from the models); `rules` has what the API server checks
besides: CEL rules, list keys and printed columns.
"""
