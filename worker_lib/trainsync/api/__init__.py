"""The TrainingRun resource and the monitor's wire protocol, as pydantic models.

Everything else in the project may import this package; it imports nothing of the project.
"""
