"""The TrainingRun resource and the monitor's wire protocol, as pydantic models.

Every package of the project may import this one; this package imports none of them.
"""
