"""verl with trainsync: manifests for verl's trainer, and training with verl's engine on CPUs."""
