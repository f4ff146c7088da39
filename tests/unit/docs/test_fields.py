"""Fields that the pages name, between backticks, are fields of the resource or of the chart."""

import re
from typing import Any

import pytest
import yaml

from tests.unit.docs.pages import ROOT, pages, prose
from tests.unit.docs.programs import has_value

_CRD = yaml.safe_load((ROOT / "crds/trainsync.dev_trainingruns.yaml").read_text())
_SCHEMA: dict[str, Any] = _CRD["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]
# Sections of the spec that the pages name without it.
_SECTIONS = ("checkpoint", "failurePolicy", "monitor", "sync")
_FIELD = re.compile(rf"`((?:spec|status|{'|'.join(_SECTIONS)})(?:\.[a-z]\w*(?:\[\])?)+)[^`\w.]*`")
# Pages for contributors speak of the fields of other resources too.
_READ = [page for page in pages() if page.parent.name != "dev"]
_PLATFORM = {"install.md", "operate.md", "security.md", "upgrade.md"}
_VALUE = re.compile(r"`((?:crds|image|metrics|monitorImage|serviceAccount)(?:\.[a-z]\w*)+)`")


def has_field(path: str) -> bool:
    """Whether the resource has ``path``, such as ``spec.sync.method`` or ``sync.method``."""
    names = re.sub(r"\[\]", "", path).split(".")
    node: Any = {"properties": _SCHEMA if names[0] not in _SECTIONS else _spec()}
    for name in names:
        if node.get("x-kubernetes-preserve-unknown-fields") or "additionalProperties" in node:
            return True
        node = node.get("items", node).get("properties", {}).get(name)
        if node is None:
            return False
    return True


def _spec() -> dict[str, Any]:
    fields: dict[str, Any] = _SCHEMA["spec"]["properties"]
    return fields


@pytest.mark.parametrize("page", _READ, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_field_that_a_page_names_is_in_the_crd(page):
    named = _FIELD.findall(prose(page))
    assert [path for path in named if not has_field(path)] == []


def test_every_value_that_a_page_for_platform_engineers_names_is_in_the_chart():
    read = [page for page in pages() if page.name in _PLATFORM]
    named = [(page.name, path) for page in read for path in _VALUE.findall(prose(page))]
    assert named
    assert [(name, path) for name, path in named if not has_value(path)] == []


def test_fields_are_found_by_their_path():
    assert has_field("spec.sync.method")
    assert has_field("sync.method")
    assert has_field("status.weights.explorers[].message")
    assert not has_field("spec.sync.methd")
    assert not has_field("checkpoint.interval.x")
    assert len({path for page in pages() for path in _FIELD.findall(prose(page))}) > 10
