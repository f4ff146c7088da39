"""Finds the rule of `spec.failurePolicy.rules` that a failure meets; pure.

Messages are matched in time linear in their length: an expression has no repetitions but ``.*``
(the CRD refuses others), and each part between two of them is searched for after the one before.
"""

import re
from typing import Final

from trainsync.api.failure_policy import ExitCodeOperator, FailureRule, OnExitCodes

from trainsync_operator.reconcile.decide.failures import Cause

_TOKEN: Final = re.compile(r"\.\*|\||\\.|\[[^\]]*\]|.", re.DOTALL)


def found(expression: str, text: str) -> bool:
    """Whether the expression (`trainsync.api.spec.MESSAGE_PATTERN`) is found in the text."""
    choices: list[list[str]] = [[""]]
    for token in _TOKEN.findall(expression):
        if token == "|":
            choices.append([""])
        elif token == ".*":
            choices[-1].append("")
        else:
            choices[-1][-1] += token
    return any(_found_in_turn(parts, text) for parts in choices)


def _found_in_turn(parts: list[str], text: str) -> bool:
    position = 0
    for part in parts:
        match = re.compile(part, re.DOTALL).search(text, position)
        if match is None:
            return False
        position = match.end()
    return True


def _exits(wanted: OnExitCodes, cause: Cause) -> bool:
    codes = [
        code
        for container, code in cause.exits
        if wanted.container_name is None or container == wanted.container_name
    ]
    listed = wanted.operator is ExitCodeOperator.IN
    return any((code in wanted.values) is listed for code in codes)


def _matches(rule: FailureRule, cause: Cause) -> bool:
    classes = {cause.failure_class, cause.failure_class.side}
    if rule.on_classes is not None and classes.isdisjoint(rule.on_classes):
        return False
    if rule.on_exit_codes is not None and not _exits(rule.on_exit_codes, cause):
        return False
    expression = rule.on_message
    said = cause.all_messages or (cause.message,)
    return expression is None or any(found(expression, text) for text in said)


def first(rules: list[FailureRule], cause: Cause) -> tuple[int, FailureRule] | None:
    """The first rule that the failure meets, with its index.

    An edit, and a preemption by a queue, are no failures; a job that KubeRay refuses would be
    refused again. No rule is for them.
    """
    if not cause.counted or cause.hopeless:
        return None
    return next((pair for pair in enumerate(rules) if _matches(pair[1], cause)), None)
