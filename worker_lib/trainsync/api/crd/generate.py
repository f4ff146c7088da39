"""The CustomResourceDefinition, generated from the models.

Pydantic writes JSON Schema; Kubernetes requires a *structural* OpenAPI v3 schema: no references, no
``null`` alternatives, a type everywhere (its documentation: "Specifying a structural schema").
"""

from collections.abc import Mapping
from typing import Any, Final

from pydantic.json_schema import GenerateJsonSchema

from trainsync.api import names
from trainsync.api.base import Model
from trainsync.api.crd import rules
from trainsync.api.spec import TrainingRunSpec
from trainsync.api.status import TrainingRunStatus

Schema = dict[str, Any]

_KEPT: Final = (
    "type", "format", "description", "enum", "required",
    "minimum", "maximum", "minLength", "maxLength", "minItems", "maxItems",
    "minProperties", "maxProperties",
    "x-kubernetes-preserve-unknown-fields", "x-kubernetes-int-or-string",
)  # fmt: skip


class UnsupportedSchemaError(TypeError):
    """A model uses a feature that a structural schema cannot express."""


def _resolve(node: Mapping[str, Any], definitions: Mapping[str, Schema], path: str) -> Schema:
    """One node without references and without the ``null`` alternative of an optional field."""
    if "$ref" in node:
        target = definitions[str(node["$ref"]).removeprefix("#/$defs/")]
        return {**_resolve(target, definitions, path), **{k: node[k] for k in node if k != "$ref"}}
    if "anyOf" in node:
        choices = [c for c in node["anyOf"] if c.get("type") != "null"]
        if len(choices) != 1:
            raise UnsupportedSchemaError(f"{path}: a structural schema has no alternatives")
        merged = {**_resolve(choices[0], definitions, path), **node}
        del merged["anyOf"]
        return merged
    return dict(node)


def _structural(node: Mapping[str, Any], definitions: Mapping[str, Schema], path: str) -> Schema:
    source = _resolve(node, definitions, path)
    schema: Schema = {key: source[key] for key in _KEPT if key in source}
    if path.startswith("spec"):  # a status has no defaults
        _set_default(schema, source)
    if "description" in schema:
        said = " ".join(schema["description"].split())
        schema["description"] = f"{said}{_default_words(schema)}"
    validations = [{"rule": r.rule, "message": r.message} for r in rules.RULES.get(path, [])]

    if "pattern" in source:
        pattern = str(source["pattern"])
        escaped = pattern.replace("\\", "\\\\")
        message = f"{path} {rules.PATTERN_MESSAGES[pattern]}"
        validations.insert(0, {"rule": f"self.matches('{escaped}')", "message": message})
    if "properties" in source:
        schema["properties"] = {
            name: _structural(child, definitions, f"{path}.{name}" if path else name)
            for name, child in source["properties"].items()
        }
    elif isinstance(source.get("additionalProperties"), dict):
        schema["additionalProperties"] = _structural(
            source["additionalProperties"], definitions, f"{path}{{}}"
        )
    if "items" in source:
        schema["items"] = _structural(source["items"], definitions, f"{path}[]")
    if path in rules.LIST_KEYS:
        schema["x-kubernetes-list-type"] = "map"
        schema["x-kubernetes-list-map-keys"] = [rules.LIST_KEYS[path]]
    if validations:
        schema["x-kubernetes-validations"] = validations
    if "type" not in schema and not schema.get("x-kubernetes-int-or-string"):
        raise UnsupportedSchemaError(f"{path}: no type")
    return schema


class _WithFactories(GenerateJsonSchema):
    """Also writes defaults made by factories, which pydantic leaves out of JSON Schema."""

    def get_default_value(self, schema: Any) -> Any:
        if "default_factory" in schema:
            return schema["default_factory"]()
        return super().get_default_value(schema)


def _set_default(schema: Schema, source: Mapping[str, Any]) -> None:
    default = source.get("default")
    if default is None:
        return
    # The API server also fills in the defaults of the object's own fields. It checks a default of
    # {} before it does: a CEL rule that needs a part makes the CRD invalid.
    schema["default"] = {} if "properties" in source else default


def _default_words(schema: Schema) -> str:
    """The default in words, as `kubectl explain` shows descriptions alone."""
    default = schema.get("default")
    if default is None or isinstance(default, dict | list):
        return ""
    return f" Default: {str(default).lower() if isinstance(default, bool) else default}."


def model_schema(model: type[Model], path: str) -> Schema:
    """The structural schema of ``model`` at ``path`` of the resource.

    Raises:
        UnsupportedSchemaError: a structural schema cannot express the model.
    """
    source = model.model_json_schema(
        by_alias=True, mode="validation", schema_generator=_WithFactories
    )
    return _structural(source, source.get("$defs", {}), path)


def resource_schema() -> Schema:
    """``openAPIV3Schema`` of the TrainingRun."""
    schema: Schema = {
        "type": "object",
        "description": "One run of RL post-training: its Ray clusters, checkpoints and weights.",
        "required": ["spec"],
        "properties": {
            "apiVersion": {"type": "string", "description": f"{names.GROUP}/{names.VERSION}."},
            "kind": {"type": "string", "description": f"{names.KIND}."},
            # Bounded to limit the rules' cost; the rule on the length comes earlier.
            "metadata": {
                "type": "object",
                "properties": {
                    "name": {
                        "type": "string",
                        "description": "Name of the run; its children carry it in theirs.",
                        "maxLength": 63,
                    }
                },
            },
            "spec": model_schema(TrainingRunSpec, "spec"),
            "status": model_schema(TrainingRunStatus, "status"),
        },
        "x-kubernetes-validations": [
            {"rule": r.rule, "message": r.message} for r in rules.RULES[""]
        ],
    }
    return schema


def custom_resource_definition() -> dict[str, Any]:
    """The whole CustomResourceDefinition as plain data."""
    columns = [
        {"name": name, "type": kind, "jsonPath": path, **({"priority": 1} if wide else {})}
        for name, kind, path, wide in rules.COLUMNS
    ]
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{names.PLURAL}.{names.GROUP}"},
        "spec": {
            "group": names.GROUP,
            "scope": "Namespaced",
            "names": {
                "kind": names.KIND,
                "listKind": f"{names.KIND}List",
                "plural": names.PLURAL,
                "singular": names.SINGULAR,
                "shortNames": [names.SHORT_NAME],
                "categories": ["all", "ml"],
            },
            "versions": [
                {
                    "name": names.VERSION,
                    "served": True,
                    "storage": True,
                    "subresources": {
                        "status": {},
                        # A path goes through no list: the explorers' group has a field of its own.
                        "scale": {
                            "specReplicasPath": ".spec.explorerReplicas",
                            "statusReplicasPath": ".status.explorerReplicas",
                            "labelSelectorPath": ".status.explorerSelector",
                        },
                    },
                    "additionalPrinterColumns": columns,
                    "schema": {"openAPIV3Schema": resource_schema()},
                }
            ],
        },
    }


def to_yaml() -> str:
    """The file in ``crds/``."""
    # Imported here: only the generator needs YAML.
    import yaml

    header = "# Generated by `make crd` from worker_lib/trainsync/api; do not edit.\n"
    body: str = yaml.safe_dump(
        custom_resource_definition(), sort_keys=False, width=100, allow_unicode=True
    )
    return header + body
