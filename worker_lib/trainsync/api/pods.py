"""Pod templates that a user writes, as far as the CRD describes them."""

from collections.abc import Mapping
from typing import Any


def gpus_of_containers(spec: Mapping[str, Any] | None) -> float:
    """The GPUs of a pod of this PodSpec: limits whose names end with ``gpu``."""
    containers = (spec or {}).get("containers") or []
    limits = [(container.get("resources") or {}).get("limits") or {} for container in containers]
    found = (value for limit in limits for name, value in limit.items() if is_gpu(name))
    return sum(_number(value) for value in found)


def is_gpu(resource: str) -> bool:
    """Whether a resource of this name is GPUs."""
    return "/" in resource and resource.endswith("gpu")


def _number(value: object) -> float:
    try:
        return float(str(value))
    except ValueError:
        return 0.0  # no quantity of whole devices


def template_schema(
    first: str, image: str, *, required: Mapping[str, list[str]] | None = None
) -> dict[str, Any]:
    """The schema of a pod template, of which the API server keeps all fields.

    Names and images of containers are declared so that rules can read them.

    Args:
        first: what the first container is, as a clause.
        image: what a container without an image gets, as a clause.
        required: fields that must be there, by `template`, `spec` and `container`.
    """
    needed = {part: {"required": fields} for part, fields in (required or {}).items()}
    container = {
        "type": "object",
        "x-kubernetes-preserve-unknown-fields": True,
        **needed.get("container", {}),
        "properties": {
            "name": {"type": "string", "description": "Name of the container.", "maxLength": 63},
            "image": {
                "type": "string",
                "description": f"Image; {image}.",
                "minLength": 1,
                "maxLength": 512,
            },
        },
    }
    return {
        "type": "object",
        "x-kubernetes-preserve-unknown-fields": True,
        **needed.get("template", {}),
        "properties": {
            "metadata": {
                "type": "object",
                "description": "Labels and annotations of the pods.",
                "x-kubernetes-preserve-unknown-fields": True,
            },
            "spec": {
                "type": "object",
                "description": "PodSpec of Kubernetes; the operator adds what the run needs.",
                "x-kubernetes-preserve-unknown-fields": True,
                **needed.get("spec", {}),
                "properties": {
                    "containers": {
                        "type": "array",
                        "description": f"Containers of the pod; {first}.",
                        "minItems": 1,
                        "maxItems": 32,
                        "items": container,
                    }
                },
            },
        },
    }
