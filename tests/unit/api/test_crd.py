"""The CRD that the models make."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import Field
from trainsync.api.base import Model
from trainsync.api.crd import generate as crd
from trainsync.api.crd import rules
from trainsync.api.crd.generate import UnsupportedSchemaError
from trainsync.api.spec import TrainingRunSpec

ROOT = Path(__file__).resolve().parents[3]
FILE = ROOT / "crds" / "trainsync.dev_trainingruns.yaml"


def nodes(schema: dict[str, Any], path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Every node of a schema, with its path as the rules write it."""
    yield path, schema
    for name, child in schema.get("properties", {}).items():
        yield from nodes(child, f"{path}.{name}" if path else name)
    if "items" in schema:
        yield from nodes(schema["items"], f"{path}[]")
    if "additionalProperties" in schema:
        yield from nodes(schema["additionalProperties"], f"{path}{{}}")


SCHEMA = crd.resource_schema()


def test_the_file_is_what_the_models_say() -> None:
    assert FILE.read_text() == crd.to_yaml(), "the models have changed: run `make crd`"


def test_the_file_fits_into_the_annotation_of_kubectl_apply_twice() -> None:
    assert len(json.dumps(yaml.safe_load(FILE.read_text()))) < 256 * 1024 / 2


def test_every_node_has_a_type_and_no_alternatives() -> None:
    for path, node in nodes(SCHEMA):
        assert "type" in node or node.get("x-kubernetes-int-or-string"), path
        assert not {"anyOf", "oneOf", "allOf", "$ref", "title"} & node.keys(), path


def test_every_property_says_what_it_is() -> None:
    """`kubectl explain` shows these sentences."""
    for path, node in nodes(SCHEMA):
        # The API server has a sentence of its own for metadata, and refuses another.
        if path not in ("", "metadata") and not path.endswith(("[]", "{}")):
            assert node.get("description", "").endswith("."), path


def test_every_property_with_a_default_says_it() -> None:
    for path, node in nodes(SCHEMA):
        default = node.get("default")
        if default is not None and not isinstance(default, dict | list):
            word = str(default).lower() if isinstance(default, bool) else str(default)
            assert node["description"].endswith(f"Default: {word}."), path


def test_every_optional_value_says_what_its_absence_means() -> None:
    for path, node in nodes(SCHEMA["properties"]["spec"], "spec"):
        for name, child in node.get("properties", {}).items():
            given = name in node.get("required", []) or "default" in child
            # The parts of an object say it themselves, and a pod template is Kubernetes's own.
            if given or child.get("type") == "object" or ".template" in path:
                continue
            assert "absent" in child["description"].lower(), f"{path}.{name}"


def test_every_rule_and_key_lies_at_a_place_that_exists() -> None:
    places = {path for path, _ in nodes(SCHEMA)}
    assert set(rules.RULES) <= places
    assert set(rules.LIST_KEYS) <= places


def test_no_rule_lies_at_a_place_whose_default_lacks_what_it_reads() -> None:
    # The API server checks a default by the rules before it fills in the defaults inside of it.
    for path, node in nodes(SCHEMA):
        if node.get("default") == {}:
            assert "x-kubernetes-validations" not in node, path


def test_every_list_and_text_under_a_rule_is_bounded() -> None:
    for path, node in nodes(SCHEMA):
        if path.startswith("spec") and node.get("type") == "array":
            assert "maxItems" in node, path
        if path.startswith("spec") and node.get("type") == "string" and "enum" not in node:
            assert "maxLength" in node, path


def test_every_message_is_one_sentence_that_names_its_field_and_says_what_to_do() -> None:
    for path, node in nodes(SCHEMA):
        for rule in node.get("x-kubernetes-validations", []):
            message = rule["message"]
            assert message.startswith(("spec.", "metadata.")), message
            assert any(word in message for word in (": ", "must ", "such as")), message
            assert "\n" not in message, path


def test_defaults_are_those_of_the_models() -> None:
    given = {
        "clusters": [
            {"name": "a", "rayVersion": "2.60.0", "groups": [{"name": "t", "role": "Trainer"}]}
        ],
        "checkpoint": {"storage": {}},
    }
    model = TrainingRunSpec.model_validate(given).to_json_dict()

    def filled(schema: dict[str, Any], value: Any) -> Any:
        """As the API server fills defaults in."""
        if isinstance(value, list):
            return [filled(schema["items"], item) for item in value]
        if not isinstance(value, dict) or "properties" not in schema:
            return value
        result = dict(value)
        for name, child in schema["properties"].items():
            if name not in result and "default" in child:
                result[name] = child["default"]
            if name in result:
                result[name] = filled(child, result[name])
        return result

    assert filled(SCHEMA["properties"]["spec"], given) == model


def test_a_status_has_no_defaults() -> None:
    for path, node in nodes(SCHEMA):
        if path.startswith("status"):
            assert "default" not in node, path


def test_lists_with_a_key_are_maps() -> None:
    found = dict(nodes(SCHEMA))
    for path, key in rules.LIST_KEYS.items():
        assert found[path]["x-kubernetes-list-type"] == "map"
        assert found[path]["x-kubernetes-list-map-keys"] == [key]
        assert key in found[f"{path}[]"]["required"]


def test_a_model_that_a_structural_schema_cannot_say_is_refused() -> None:
    class Either(Model):
        value: int | str = Field(default=1)

    with pytest.raises(UnsupportedSchemaError, match=r"spec.value"):
        crd.model_schema(Either, "spec")


def test_printer_columns_point_at_fields_that_exist() -> None:
    places = {path for path, _ in nodes(SCHEMA)} | {"metadata.creationTimestamp"}
    for _, _, path, _ in rules.COLUMNS:
        plain = path.removeprefix(".").split("[")[0]
        assert plain in places, path


def test_the_scale_subresource_points_at_fields_that_exist() -> None:
    (version,) = crd.custom_resource_definition()["spec"]["versions"]
    places = {path for path, _ in nodes(SCHEMA)}
    for path in version["subresources"]["scale"].values():
        assert path.removeprefix(".") in places, path
