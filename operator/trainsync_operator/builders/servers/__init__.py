"""Children of one entry of spec.servers: a Deployment, its Service and its disruption budget.

Begin at `deployment`, or `leader_worker_set` where a server has several nodes; `pod` adds the agent
to the pod template, `hosts` what the pods of one server know of one another.
"""
