"""verl on trainsync: manifests of its own trainer, and its engine trained on CPUs."""
