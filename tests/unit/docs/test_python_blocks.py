"""Python on the pages compiles, and names what exists: modules, attributes, keyword arguments."""

import ast
import inspect
import re
from importlib import import_module
from typing import Any

import pytest
import trainsync
from trainsync.weights.pacing.loops import ExplorerPace, TrainerPace

from tests.unit.docs.pages import ROOT, all_blocks

_BLOCKS = all_blocks("python")
# The pages' names.
_KINDS: dict[str, tuple[Any, ...]] = {
    "ctx": (trainsync.RunContext,),
    "coordinator": (trainsync.CheckpointCoordinator,),
    "publisher": (trainsync.WeightPublisher,),
    "client": (trainsync.ExplorerClient,),
    "pace": (TrainerPace, ExplorerPace),
    "resume": (trainsync.Resume,),
    "loaded": (trainsync.Loaded,),
    "report": (trainsync.PublishReport,),
    "trainsync": (trainsync,),
}


def _tree(text: str) -> ast.Module:
    flags = ast.PyCF_ONLY_AST | ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
    tree = compile(text, "<block>", "exec", flags=flags)
    assert isinstance(tree, ast.Module)
    return tree


def complaints(text: str) -> list[str]:
    """What in the block does not exist in trainsync.

    Raises:
        SyntaxError: it is no Python.
    """
    found: list[str] = []
    for node in ast.walk(_tree(text)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("trainsync"):
            module = import_module(node.module or "")
            missing = [alias.name for alias in node.names if not hasattr(module, alias.name)]
            found += [f"{node.module} has no {name}" for name in missing]
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            kinds = _KINDS.get(node.value.id, ())
            if kinds and not any(_has(kind, node.attr) for kind in kinds):
                found.append(f"{node.value.id} has no {node.attr}")
        elif isinstance(node, ast.Call):
            found += _wrong_keywords(node)
    return found


def _has(kind: Any, name: str) -> bool:
    if kind is trainsync:  # whose names are loaded, with verl and all, when they are asked for
        return name in trainsync.__all__
    return hasattr(kind, name) or name in inspect.get_annotations(kind)


def _wrong_keywords(call: ast.Call) -> list[str]:
    function = call.func
    given = [keyword.arg for keyword in call.keywords if keyword.arg]
    if not given or not (
        isinstance(function, ast.Attribute) and isinstance(function.value, ast.Name)
    ):
        return []
    called = [getattr(k, function.attr, None) for k in _KINDS.get(function.value.id, ())]
    signatures = [inspect.signature(c) for c in called if callable(c)]
    if not signatures:
        return []
    return [
        f"{function.value.id}.{function.attr} takes no {name}="
        for name in given
        if not any(_takes(signature, name) for signature in signatures)
    ]


def _takes(signature: inspect.Signature, name: str) -> bool:
    kinds = {parameter.kind for parameter in signature.parameters.values()}
    return name in signature.parameters or inspect.Parameter.VAR_KEYWORD in kinds


@pytest.mark.parametrize("block", _BLOCKS, ids=lambda block: block.where)
def test_every_python_block_compiles_and_names_what_exists(block):
    assert complaints(block.text) == []


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("from trainsync import NoSuchName", "trainsync has no NoSuchName"),
        ("ctx.explode()", "ctx has no explode"),
        ("trainsync.load_shardedd(resume)", "trainsync has no load_shardedd"),
        ("trainsync.load_sharded(resume, modle=m)", "trainsync.load_sharded takes no modle="),
        ("x = ctx.coordinator(0, 1, overlap=True)", "ctx.coordinator takes no overlap="),
    ],
)
def test_a_name_that_does_not_exist_is_noticed(text, said):
    assert complaints(text) == [said]


def test_a_block_that_is_no_python_is_noticed():
    with pytest.raises(SyntaxError):
        complaints("for x in range(3) print(x)")


def test_the_api_page_has_every_public_name_and_no_other():
    page = (ROOT / "docs/api.md").read_text()
    shown = re.findall(r"^::: (\S+)\.(\w+)$", page, re.MULTILINE)
    assert {name: module for module, name in shown} == trainsync._HOMES
    assert sorted(trainsync._HOMES) == sorted(trainsync.__all__)


def test_a_plain_fsdp2_script_needs_at_most_eight_lines_of_trainsync() -> None:
    ours = re.compile(r"trainsync|\bctx\b|\bcoordinator\b")
    (script,) = (b for b in _BLOCKS if b.directive == "file fsdp.py")
    lines = [line for line in script.text.splitlines() if ours.search(line.partition("#")[0])]
    assert len(lines) <= 8, "\n".join(lines)
