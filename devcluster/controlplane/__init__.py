"""The Kubernetes servers of a cluster, and what they need: certificates, requests, volumes.

Begin at `servers`.
"""
