"""The last lines of a container that failed: bounded, and without the secrets of its pod; pure.

The kubelet puts them into the pod's status (`terminationMessagePolicy: FallbackToLogsOnError`, at
most 80 lines or 2048 bytes), so that the operator needs no right to read logs.
"""

import re
from typing import Any, Final

import yaml

from trainsync_operator.kube.objects import Object

LINES: Final = 20
LENGTH: Final = 600
_FIRST: Final = 200
_MASK: Final = "***"
# The kubelet cuts longer messages at their beginning, and perhaps within a secret.
_CUT: Final = 2000
_SECRET: Final = (
    r"(?:token|secret|passw|passphrase|api_?-?key|access_?-?key|private_?-?key|credential|auth)"
)
_SECRET_NAME: Final = re.compile(_SECRET, re.IGNORECASE)
_ASSIGNED: Final = re.compile(
    rf"({_SECRET}[\w-]{{0,40}}[\"']?\s{{0,3}}[=:]\s{{0,3}})((?:bearer|basic)\s{{1,3}})?[^\s,;&|]+",
    re.IGNORECASE,
)
_IN_ADDRESS: Final = re.compile(r"://[^/\s@]{1,200}@")
# A shorter value is no secret, and a mask would spoil the text.
_SHORTEST: Final = 4


def secret_entries(container: dict[str, Any]) -> list[dict[str, Any]]:
    """The environment variables of a container whose name sounds like a secret."""
    entries = container.get("env") or []
    return [entry for entry in entries if _SECRET_NAME.search(entry.get("name", ""))]


def secrets_of(pod: Object) -> set[str]:
    """Values of a pod's environment variables whose name sounds like a secret."""
    spec = pod.get("spec") or {}
    return {
        line
        for container in (spec.get("initContainers") or []) + (spec.get("containers") or [])
        for entry in secret_entries(container)
        for line in str(entry.get("value") or "").splitlines()
    }


def secrets_of_job(runtime_env: str) -> set[str]:
    """The same of the ``env_vars`` of a runtime environment in YAML."""
    try:
        found = yaml.safe_load(runtime_env)
    except yaml.YAMLError:
        return set()  # Ray has refused the job
    variables = found.get("env_vars") if isinstance(found, dict) else None
    entries = [{"name": str(k), "value": v} for k, v in (variables or {}).items()]
    return secrets_of({"spec": {"containers": [{"env": entries}]}})


def masked(text: str, secrets: set[str]) -> str:
    """``text`` without the secrets, and without what looks like one.

    The values of variables that come from a Secret are not known to the operator: of those only
    what looks like a secret (`api_key=...`, a password in an address) is masked.
    """
    long_enough = (value for value in secrets if len(value) >= _SHORTEST)
    for value in sorted(long_enough, key=len, reverse=True):
        text = text.replace(value, _MASK)
    text = _IN_ADDRESS.sub(f"://{_MASK}@", text)
    return _ASSIGNED.sub(rf"\1{_MASK}", text)


def of(terminated: dict[str, Any], pod: Object) -> str | None:
    """The last lines of a terminated container, in one line; None where it left none."""
    lines = str(terminated.get("message") or "").splitlines()
    if len(lines) > 1 and len(str(terminated["message"]).encode()) >= _CUT:
        lines = lines[1:]
    return _last(masked("\n".join(lines), secrets_of(pod))) or None


def _last(text: str) -> str:
    kept = [line for line in text.splitlines() if line.strip()]
    said = " | ".join(" ".join(line.split()) for line in kept[-LINES:])
    return said if len(said) <= LENGTH else "…" + said[-LENGTH + 1 :]


def of_job(message: str, secrets: set[str]) -> str:
    """KubeRay's message of a job that failed, in one line: its beginning, and its last lines.

    Ray's message is one sentence, and then up to 20,000 characters of the driver's log, the last of
    which say why the job failed.
    """
    text = masked(message, secrets)
    whole = " ".join(text.split())
    if len(whole) <= LENGTH:
        return whole
    first = " ".join(text.strip().splitlines()[0].split())[:_FIRST]
    return f"{first} {_last(text)}"
