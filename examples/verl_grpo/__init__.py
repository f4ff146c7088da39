"""verl with trainsync: manifests for verl's trainer, and training with verl's engine on CPUs.

Begin at ``fsdp.yaml``, or at `train_on_cpu`.
"""
