"""The cluster tests' operator, on a cluster with LWS."""

from tests.cluster.conftest import crd, kubeconfig, kubectl, module_namespace

__all__ = ["crd", "kubeconfig", "kubectl", "module_namespace"]
