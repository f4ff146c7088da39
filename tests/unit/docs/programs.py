"""Checks of documented commands, one for each program; a check returns an error text or None."""

import argparse
import contextlib
import importlib.util
import io
import json
import os
import re
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import typer.main
from trainsync.agent import settings
from trainsync.cli.app import app

from devcluster import cli as devcluster_cli
from tests.faults import __main__ as faults
from tests.unit.docs.commands import Command, split
from tests.unit.docs.pages import ROOT, blocks

_CHART = ROOT / "charts/trainsync-operator"
# Standard programs, whose commands are not checked.
_FOREIGN = {
    "cd", "cp", "curl", "dd", "export", "git", "grep", "kill", "ls", "mkdir", "printf", "ray",
    "rm", "source", "tar", "vllm", "sglang",
}  # fmt: skip
_KUBECTL = {
    "annotate", "api-resources", "apply", "auth", "config", "cp", "create", "delete", "describe",
    "edit", "events", "exec", "explain", "get", "label", "logs", "patch", "port-forward", "replace",
    "rollout", "run", "scale", "top", "trainsync", "version", "wait",
}  # fmt: skip
_PARSERS: dict[str, Callable[[], argparse.ArgumentParser]] = {
    "devcluster": devcluster_cli._parser,
    "tests.faults": faults._parser,
    "trainsync.agent": settings.parser,
}


def complaint(command: Command) -> str | None:
    """The error in a documented command that can be found without running it, or None."""
    program = Path(command.program).name
    check = _CHECKS.get("python" if re.fullmatch(r"python[\d.]*", program) else program)
    if check is not None:
        return check(command)
    if program in _FOREIGN:
        return None
    return f"{program!r} is no program that tests/unit/docs/programs.py knows"


def make_targets() -> set[str]:
    """The targets of the Makefile."""
    return set(re.findall(r"^([a-z][\w-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE))


def _make(command: Command) -> str | None:
    makefile = (ROOT / "Makefile").read_text()
    others = (ROOT / "tests/conftest.py").read_text()
    for word in (*command.arguments, *(f"{name}=" for name in command.variables)):
        name, assigned, _ = word.partition("=")
        if assigned:
            # A variable in a command's environment may be for any program.
            if word in command.arguments and name not in makefile + others:
                return f"nothing reads the variable {name}"
        elif not word.startswith("-") and word not in make_targets():
            return f"the Makefile has no target {word!r}"
    return None


def trainsync(arguments: tuple[str, ...]) -> str | None:
    """Whether the command line knows these subcommands and options."""
    command: Any = typer.main.get_command(app)
    path, rest = ["trainsync"], list(arguments)
    while hasattr(command, "commands"):
        while rest and rest[0].startswith("-"):
            if rest.pop(0) not in _options(command):
                return f"`{' '.join(path)}` has no such option; it has {_options(command)}"
        if not rest:
            return None
        if rest[0] not in command.commands:
            return f"`{' '.join(path)}` has no command {rest[0]!r}; it has {[*command.commands]}"
        path.append(rest[0])
        command = command.commands[rest.pop(0)]
    unknown = [
        word
        for word in rest
        if re.match(r"--?[a-zA-Z]", word) and word.partition("=")[0] not in _options(command)
    ]
    return f"`{' '.join(path)}` has no option {unknown[0]}" if unknown else None


def _options(command: Any) -> list[str]:
    own = [
        name
        for parameter in command.params
        for name in (*parameter.opts, *parameter.secondary_opts)
    ]
    return [*own, "--help"]


def _python(command: Command) -> str | None:
    arguments = list(command.arguments)
    while arguments and arguments[0] in {"-q", "-u"}:
        arguments.pop(0)
    if not arguments:
        return "an interpreter without a program"
    if arguments[0] == "-c":
        compile(arguments[1], command.where, "exec")
        return None
    if arguments[0] != "-m":
        return _script(command, arguments[0])
    module, *rest = arguments[1:]
    if importlib.util.find_spec(module) is None:
        return f"there is no module {module!r}"
    if module == "pytest":
        missing = [word for word in rest if word.startswith("tests/") and not _exists(word)]
        return f"there is no {missing[0]}" if missing else None
    return _parsed(module, rest)


def _parsed(module: str, arguments: list[str]) -> str | None:
    if (parser := _PARSERS.get(module)) is None:
        return None
    with contextlib.redirect_stderr(io.StringIO()) as said, contextlib.suppress(SystemExit):
        parser().parse_args(arguments)
        return None
    return said.getvalue().strip().splitlines()[-1]


def _torchrun(command: Command) -> str | None:
    words = list(command.arguments)
    if "-m" in words:
        module = words[words.index("-m") + 1]
        return None if importlib.util.find_spec(module) else f"there is no module {module!r}"
    script = next((word for word in words if word.endswith(".py")), "")
    return _script(command, script)


def _script(command: Command, name: str) -> str | None:
    page = ROOT / command.where.rpartition(":")[0]
    shown = {block.directive.removeprefix("file ") for block in blocks(page)}
    return None if name in shown or _exists(name) else f"{name!r} is neither here nor on the page"


def _kubectl(command: Command) -> str | None:
    words = list(command.arguments)
    if "--" in words:
        inner = words[words.index("--") + 1 :]
        return complaint(Command(command.where, inner[0], tuple(inner[1:])))
    verbs = [word for word in words if not word.startswith("-")]
    if words[:1] in (["-n"], ["--namespace"]):
        verbs = verbs[1:]
    if not verbs or verbs[0] not in _KUBECTL:
        return f"kubectl has no command {verbs[:1]}"
    if verbs[0] == "trainsync":
        return trainsync(tuple(words[words.index("trainsync") + 1 :]))
    files = [value for option, value in pairwise(words) if option == "-f"]
    ours = [file for file in files if "/" in file and "://" not in file and file[0] not in "/<"]
    missing = [file for file in ours if not _exists(file)]
    return f"there is no {missing[0]}" if missing else None


def _helm(command: Command) -> str | None:
    words = list(command.arguments)
    charts = [word for word in words if word.startswith("charts/")]
    if missing := [chart for chart in charts if not _exists(chart)]:
        return f"there is no {missing[0]}"
    for option, value in pairwise(words):
        if option in {"--set", "--set-string"}:
            # {a,b} is one value of a list.
            for pair in re.sub(r"\{[^}]*\}", "", value).split(","):
                if not has_value(pair.partition("=")[0]):
                    return f"the chart has no value {pair.partition('=')[0]!r}"
    return None


def has_value(path: str) -> bool:
    """Whether the chart's schema has this value; a free-form value accepts all keys below it."""
    schema: dict[str, Any] = json.loads((_CHART / "values.schema.json").read_text())
    node: Any = schema
    for name in re.sub(r"\[\d+\]", "", path).replace(r"\.", " ").split("."):
        while "$ref" in node:
            node = _referred(schema, node["$ref"])
        properties = node.get("properties", {})
        if name not in properties:
            patterns = node.get("patternProperties", {})
            if any(re.search(pattern, name.replace(" ", ".")) for pattern in patterns):
                return True
            return not properties and node.get("additionalProperties", True) is not False
        node = properties[name]
    return True


def _referred(schema: dict[str, Any], reference: str) -> Any:
    node: Any = schema
    for name in reference.removeprefix("#/").split("/"):
        node = node[name]
    return node


def _docker(command: Command) -> str | None:
    words = list(command.arguments)
    if "-f" not in words:
        return None
    file = words[words.index("-f") + 1]
    return None if _exists(file) else f"there is no {file}"


def _pip(command: Command) -> str | None:
    if any(re.match(r"trainsync\b", word) for word in command.arguments):
        return "trainsync is on no package index: install it from a clone"
    for extra in re.findall(r"\[([\w,]+)\]", " ".join(command.arguments)):
        text = (ROOT / "pyproject.toml").read_text()
        for name in extra.split(","):
            if not re.search(rf"^{name} = \[", text, re.MULTILINE):
                return f"there is no extra {name!r}"
    return None


def _exists(path: str) -> bool:
    return any(ROOT.glob(os.path.normpath(path)))


_CHECKS: dict[str, Callable[[Command], str | None]] = {
    "docker": _docker,
    "helm": _helm,
    "kubectl": _kubectl,
    "make": _make,
    "pip": _pip,
    "python": _python,
    "torchrun": _torchrun,
    "trainsync": lambda command: trainsync(command.arguments),
    "kubectl-trainsync": lambda command: trainsync(command.arguments),
}


def inline(text: str, where: str) -> list[Command]:
    """Our commands between backticks in the text; ``a x | y`` means two commands."""
    found = []
    for words in re.findall(r"`((?:make|pip|trainsync) [a-z][^`]*)`", text):
        first, *others = words.replace("…", "").split(" | ")
        parent = first.rpartition(" ")[0]
        for line in (first, *(f"{parent} {other}" for other in others)):
            found += split(line, where)
    return found
