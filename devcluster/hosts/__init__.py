"""Control plane and nodes as hosts of their own: namespaces, links, cgroups, and their process 1.

Begin at `node` (what runs on a node); `processes` starts a set of namespaces with `init` in it.
"""
