"""The TrainingRun resource and the monitor's wire protocol, as pydantic models.

Begin at `spec` and `status` (the resource; crd/ writes the CRD file, with the checks that the API
server makes) and `protocol` (messages to the monitor). Every package of the project may import this
one; this package imports none of them.
"""
