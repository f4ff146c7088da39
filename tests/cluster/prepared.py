"""The tests' cluster with the images of this tree."""

import os

import pytest

from demo.platform import Images, Platform, own_cluster, prepare
from devcluster.shell import Progress

IMAGE_VARIABLES = ("OPERATOR_IMAGE", "MONITOR_IMAGE", "RAY_IMAGE")


def prepared() -> Platform:
    """The development cluster, or the cluster of KUBECONFIG with the environment's images."""
    kubeconfig = os.environ.get("KUBECONFIG")
    images = None
    if own_cluster(kubeconfig):
        if not all(name in os.environ for name in IMAGE_VARIABLES):
            pytest.skip(f"KUBECONFIG is a cluster of yours: name its images in {IMAGE_VARIABLES}")
        images = Images(*(os.environ[name] for name in IMAGE_VARIABLES))
    return prepare(kubeconfig, images, Progress())
