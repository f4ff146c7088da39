"""``rayStartParams`` of tests' small Ray clusters in pods."""

# Ray's minimum of memory; the default is a third of the node. Nothing here asks for a worker's log
# at its driver, or for Ray's autoscaler. (KubeRay drops a parameter that is "false".)
LITTLE_RAY = {"object-store-memory": "100000000", "include-log-monitor": "no"}
LITTLE_HEAD = {**LITTLE_RAY, "no-monitor": "true"}
