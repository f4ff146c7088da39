"""Children of one entry of spec.servers: a Deployment, its Service and its disruption budget."""
