import copy
from pathlib import Path
from typing import Any

import yaml
from trainsync.api.spec import TrainingRunSpec

from demo.adapt import for_devcluster, with_image

REPOSITORY = Path(__file__).parents[3]
EXAMPLE = REPOSITORY / "examples" / "tiny_grpo" / "trainingrun.yaml"


def example() -> dict[str, Any]:
    return dict(yaml.safe_load(EXAMPLE.read_text()))


def pod_specs(run: dict[str, Any]) -> list[dict[str, Any]]:
    (cluster,) = run["spec"]["clusters"]
    return [owner["template"]["spec"] for owner in (cluster["head"], *cluster["groups"])]


def test_every_ray_pod_gets_the_environment_and_the_image() -> None:
    fitted = for_devcluster(example(), "localhost/ray:1", Path("/cache/env"), "/opt/env")
    TrainingRunSpec.model_validate(fitted["spec"])
    assert fitted["spec"]["clusters"][0]["image"] == "localhost/ray:1"
    for spec in pod_specs(fitted):
        container = spec["containers"][0]
        assert "image" not in container
        assert {"name": "trainsync-env", "hostPath": {"path": "/cache/env"}} in spec["volumes"]
        mount = {"name": "trainsync-env", "mountPath": "/opt/env", "readOnly": True}
        assert mount in container["volumeMounts"]
        assert container["resources"] == {"requests": {"cpu": "100m", "memory": "1Gi"}}


def test_the_given_run_is_left_as_it_was() -> None:
    run = example()
    before = copy.deepcopy(run)
    for_devcluster(run, "image:1", Path("/env"), "/opt/env")
    with_image(run, "image:1")
    assert run == before


def test_pods_without_a_template_get_one() -> None:
    run = example()
    (cluster,) = run["spec"]["clusters"]
    del cluster["head"]
    del cluster["groups"][0]["template"]
    specs = pod_specs(for_devcluster(run, "image:1", Path("/env"), "/opt/env"))
    assert [len(spec["volumes"]) for spec in specs] == [1, 1, 1]


def test_on_another_cluster_only_the_image_changes() -> None:
    fitted = with_image(example(), "registry.example/ray:2")
    expected = example()
    expected["spec"]["clusters"][0]["image"] = "registry.example/ray:2"
    assert fitted == expected
