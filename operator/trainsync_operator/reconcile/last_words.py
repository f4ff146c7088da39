"""The last lines of a container that failed: bounded, and without the secrets of its pod; pure.

The kubelet puts them into the pod's status (`terminationMessagePolicy: FallbackToLogsOnError`, at
most 80 lines or 2048 bytes), so that the operator needs no right to read logs.
"""

import re
from typing import Any, Final

from trainsync_operator.kube.objects import Object

LINES: Final = 20
LENGTH: Final = 600
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
# A shorter value is no secret, and masking it would spoil the text.
_SHORTEST: Final = 4


def _secrets(pod: Object) -> list[str]:
    """Values of environment variables whose name sounds like a secret, the longest first."""
    spec = pod.get("spec") or {}
    values: set[str] = set()
    for container in (spec.get("initContainers") or []) + (spec.get("containers") or []):
        for entry in container.get("env") or []:
            if _SECRET_NAME.search(entry.get("name", "")):
                values.update(str(entry.get("value") or "").splitlines())
    return sorted((v for v in values if len(v) >= _SHORTEST), key=len, reverse=True)


def masked(text: str, pod: Object) -> str:
    """``text`` without the pod's secrets, and without what looks like one.

    The values of variables that come from a Secret are not known to the operator: of those only
    what looks like a secret (`api_key=...`, a password in an address) is masked.
    """
    for value in _secrets(pod):
        text = text.replace(value, _MASK)
    text = _IN_ADDRESS.sub(f"://{_MASK}@", text)
    return _ASSIGNED.sub(rf"\1{_MASK}", text)


def of(terminated: dict[str, Any], pod: Object) -> str | None:
    """The last lines of a terminated container, in one line; None where it left none."""
    lines = str(terminated.get("message") or "").splitlines()
    if len(lines) > 1 and len(str(terminated["message"]).encode()) >= _CUT:
        lines = lines[1:]
    kept = [line for line in masked("\n".join(lines), pod).splitlines() if line.strip()]
    text = " | ".join(" ".join(line.split()) for line in kept[-LINES:])
    if len(text) > LENGTH:
        text = "…" + text[-LENGTH + 1 :]
    return text or None
