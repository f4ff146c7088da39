"""The operator for all namespaces, with the rights of the chart's ClusterRole."""

from pathlib import Path

import pytest
from trainsync.api import names

from tests.cluster.conftest import Kubectl, wait_until
from tests.cluster.operator.operator_process import OperatorProcess, forget_everywhere
from tests.cluster.operator.test_children import CHILDREN, NO_IMAGE, delete, manifest

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.timeout(300),
    pytest.mark.usefixtures("crd"),
]


MADE = "made RayCluster anywhere-main-0"


def test_an_operator_for_all_namespaces_makes_the_children_too(
    namespace: Kubectl, tmp_path: Path
) -> None:
    everywhere = ("get", "trainingruns", "--all-namespaces", "-o", "name")
    try:
        # Those of the tests before go with their namespaces.
        wait_until("there are no runs", lambda: not namespace(*everywhere), 90)
    except AssertionError:
        pytest.skip(f"the cluster has runs of others, not to be touched: {namespace(*everywhere)}")
    operator = OperatorProcess(namespace, tmp_path, NO_IMAGE, everywhere=True)
    try:
        operator.start()
        done = namespace.apply(manifest("anywhere"))
        assert done.returncode == 0, done.stderr
        made = [kind for kind in CHILDREN if kind != "rolebinding"]

        def there() -> bool:
            return all(namespace.get(k, CHILDREN[k].format(run="anywhere")) for k in made)

        wait_until("all children are there", there)
        bound = namespace.list("rolebinding", f"{names.LABEL_RUN}=anywhere")
        assert [each["roleRef"]["kind"] for each in bound] == ["ClusterRole"]
        delete(namespace, "anywhere")
        assert operator.stop() == 0
        assert operator.complaints() == []
        told = [line for line in operator.lines() if "object" in line]
        assert all("reconcile" in line for line in told), told
        (made_ray,) = [line for line in told if line["message"] == MADE]
        assert (made_ray["object"]["name"], made_ray["attempt"]) == ("anywhere", 0)
    finally:
        operator.stop()
        forget_everywhere(namespace)
