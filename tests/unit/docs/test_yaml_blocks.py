import json

import jsonschema
import pytest
import yaml
from trainsync.api.spec import TrainingRunSpec

from tests.unit.docs.pages import ROOT, Block, all_blocks

_BLOCKS = all_blocks("yaml")


def _documents(block: Block) -> list[dict]:
    return [document for document in yaml.safe_load_all(block.text) if document is not None]


@pytest.mark.parametrize("block", _BLOCKS, ids=lambda block: block.where)
def test_every_yaml_block_is_valid_yaml(block):
    assert _documents(block)


def test_every_trainingrun_is_one_that_the_models_accept():
    runs = [
        (block.where, document)
        for block in _BLOCKS
        for document in _documents(block)
        if isinstance(document, dict) and document.get("kind") == "TrainingRun"
    ]
    assert runs
    for where, document in runs:
        assert document["apiVersion"] == "trainsync.dev/v1alpha1", where
        TrainingRunSpec.model_validate(document["spec"])


def test_every_block_of_chart_values_is_one_that_the_schema_accepts():
    schema = json.loads((ROOT / "charts/trainsync-operator/values.schema.json").read_text())
    for block in _BLOCKS:
        if block.directive == "values":
            jsonschema.validate(yaml.safe_load(block.text), schema)
