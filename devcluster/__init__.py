"""A real Kubernetes on this machine, in namespaces of its own, for development and tests.

Standard library only: it runs with the bare ``python3`` of Debian 12, before any virtual
environment exists. Begin at `cli` and `lifecycle`;
``devcluster/README.md`` has the shape of the whole.
"""
