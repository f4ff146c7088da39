"""Children of one entry of spec.servers: a Deployment, its Service and its disruption budget.

Begin at `deployment`; `pod` adds the agent to the pod template.
"""
