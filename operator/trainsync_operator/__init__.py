"""The trainsync Kubernetes operator."""
