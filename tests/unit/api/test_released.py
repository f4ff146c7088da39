"""The schema keeps what released versions promised: a stored TrainingRun stays valid.

Each file of ``released/`` is the CRD of a release; a release adds its own. The promise stands in
docs/upgrade.md.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest
import yaml
from trainsync.api.crd import generate as crd

from release.versions import newest_entry

Schema = dict[str, Any]

REPOSITORY: Final = Path(__file__).parents[3]
RELEASED: Final = sorted((Path(__file__).parent / "released").glob("*.yaml"))
LOWER_BOUNDS: Final = ("minimum", "minLength", "minItems", "minProperties")
UPPER_BOUNDS: Final = ("maximum", "maxLength", "maxItems", "maxProperties")
RULES: Final = "x-kubernetes-validations"
NEWER_RULES: Final = {
    "about a field that release 0.1.0 lacks": (
        "metadata.name and spec.servers[].name may have at most 55 characters together",
        "metadata.name and spec.servers[].name may have at most 39 characters together where nodes",
        "spec.servers[].name may not be that of an entry with nodes above 1, a '-' and a number",
        "spec.explorerReplicas is for runs with exactly one group of role Explorer",
        "spec.explorerReplicas is not for explorers that Ray's autoscaler counts",
        "spec.servers follow committed or stored weights",
        "spec.checkpoint.storage.objectStore.readCredentials is for spec.sync.method checkpoint",
        "spec.checkpoint.memory.copies 1 keeps each shard in another trainer pod",
        "spec.sync.store is for spec.sync.method store",
        "spec.managedBy is immutable",
        "spec.clusters[].rayClusterOverrides.enableInTreeAutoscaling goes with minReplicas",
        "spec.clusters[].groups[].minReplicas and maxReplicas go together",
        "spec.clusters[].groups[].maxReplicas is for role Explorer",
        "spec.clusters[].groups[].replicas must be between minReplicas and maxReplicas",
        "spec.checkpoint.path and mirror need a volume",
        "spec.servers[].adapter must be set on all entries or on none",
    ),
    "takes all that the rule of release 0.1.0 took": (
        "spec.clusters[].entrypoint must be set on each cluster",
        "spec.sync.method memory is for groups of roles Trainer and Explorer in one cluster",
        "spec.sync.delta is for spec.sync.method memory and nccl",
        "spec.checkpoint.storage is immutable",
        "spec.checkpoint.storage must hold exactly one of",
    ),
    "KubeRay or Kueue refused such runs, which never started": (
        "spec.clusters[].groups may have at most 7 entries",
        "spec.clusters[].groups[].name headgroup is KubeRay's name for the head, and head is",
    ),
}
"""Why rules that a release does not have are no broken promise, by how their messages begin."""


def differences(old: Schema, new: Schema, path: str) -> Iterator[str]:
    """Each way in which ``new`` refuses or loses something that ``old`` takes."""
    if (old.get("type"), old.get("format")) != (new.get("type"), new.get("format")):
        yield f"{path}: the type was {old.get('type')}, and is {new.get('type')}"
    if "enum" in new and not set(old.get("enum", [])) <= set(new["enum"]):
        yield f"{path}: {sorted(set(old['enum']) - set(new['enum']))} is refused"
    if "enum" in new and "enum" not in old:
        yield f"{path}: any value was taken"
    if added := set(new.get("required", [])) - set(old.get("required", [])):
        yield f"{path}: {sorted(added)} was optional"
    if old.get("default") != new.get("default") and not path.startswith("status"):
        yield f"{path}: the default was {old.get('default')!r}, and is {new.get('default')!r}"
    for bound in LOWER_BOUNDS:
        if new.get(bound, 0) > old.get(bound, 0):
            yield f"{path}: {bound} was {old.get(bound)}, and is {new[bound]}"
    for bound in UPPER_BOUNDS:
        if bound in new and new[bound] < old.get(bound, float("inf")):
            yield f"{path}: {bound} was {old.get(bound)}, and is {new[bound]}"
    known = {rule["rule"] for rule in old.get(RULES, [])}
    for rule in new.get(RULES, []):
        if rule["rule"] not in known and not _is_harmless(rule["message"]):
            yield f"{path}: a rule is new: {rule['message']}"
    for name, child in old.get("properties", {}).items():
        if name not in new.get("properties", {}):
            yield f"{path}.{name}: is gone"
        else:
            yield from differences(child, new["properties"][name], f"{path}.{name}".lstrip("."))
    for part, suffix in (("items", "[]"), ("additionalProperties", "{}")):
        if isinstance(old.get(part), dict):
            yield from differences(old[part], new.get(part, {}), f"{path}{suffix}")


def _is_harmless(message: str) -> bool:
    return any(message.startswith(begin) for some in NEWER_RULES.values() for begin in some)


def test_the_newest_release_has_left_its_schema() -> None:
    newest = newest_entry((REPOSITORY / "CHANGELOG.md").read_text())
    assert newest in [path.stem for path in RELEASED], f"copy the CRD to released/{newest}.yaml"


@pytest.mark.parametrize("release", RELEASED, ids=lambda path: path.stem)
def test_every_field_of_a_release_is_taken_as_before(release: Path) -> None:
    version = yaml.safe_load(release.read_text())["spec"]["versions"][0]
    old = version["schema"]["openAPIV3Schema"]
    assert not list(differences(old, crd.resource_schema(), ""))


def test_a_narrower_schema_is_found() -> None:
    def of(**field: Any) -> Schema:
        return {"type": "object", "properties": {"a": field, "b": {"type": "string"}}}

    old = of(type="integer", minimum=1, default=2)
    assert not list(differences(old, of(type="integer", default=2), ""))
    for worse in (
        of(type="string", default=2),
        of(type="integer", minimum=2, default=2),
        of(type="integer", maximum=9, default=2),
        of(type="integer", default=3),
        of(type="integer", default=2, enum=[1, 2]),
        {"type": "object", "properties": {"a": old["properties"]["a"]}},
        old | {"required": ["a"]},
        old | {RULES: [{"rule": "self.a < 9", "message": "a must be below 9: lower it"}]},
    ):
        assert len(list(differences(old, worse, ""))) == 1, worse
