"""`helm test`: the operator answers, and its account may read the kinds that it watches.

Arguments: the operator's address, and the namespaces that it serves (none: all).
"""

import os
import ssl
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
_READY_SECONDS = 60.0
_KINDS = {
    "trainsync.dev/v1alpha1/trainingruns": "the TrainingRun CRD is missing: set crds.enabled=true",
    "ray.io/v1/rayclusters": "KubeRay is missing: install it",
    "ray.io/v1/rayjobs": "KubeRay is missing: install it",
}


def wait_until_ready(address: str) -> None:
    """Poll /readyz until the operator is ready. Raises SystemExit."""
    deadline = time.monotonic() + _READY_SECONDS
    while True:
        try:
            with urllib.request.urlopen(f"{address}/readyz", timeout=5):
                return
        except OSError as error:
            if time.monotonic() > deadline:
                sys.exit(f"{address}/readyz does not answer with 200: {error}")
            time.sleep(1)


def check_metrics(address: str) -> None:
    """/metrics has the operator's series. Raises SystemExit."""
    with urllib.request.urlopen(f"{address}/metrics", timeout=5) as answer:
        if b"\ntrainsync_operator_leader " not in answer.read():
            sys.exit(f"{address}/metrics has no trainsync_operator_leader")


def check_list(kind: str, hint: str, namespace: str | None) -> None:
    """The API server lists a kind for the operator's account. Raises SystemExit."""
    group, _, plural = kind.rpartition("/")
    inside = f"namespaces/{namespace}/" if namespace else ""
    where = f"namespace {namespace}" if namespace else "all namespaces"
    host, port = os.environ["KUBERNETES_SERVICE_HOST"], os.environ["KUBERNETES_SERVICE_PORT"]
    host = f"[{host}]" if ":" in host else host
    request = urllib.request.Request(
        f"https://{host}:{port}/apis/{group}/{inside}{plural}?limit=1",
        headers={"Authorization": f"Bearer {(_ACCOUNT / 'token').read_text()}"},
    )
    context = ssl.create_default_context(cafile=str(_ACCOUNT / "ca.crt"))
    try:
        with urllib.request.urlopen(request, timeout=10, context=context):
            print(f"ok  may list {plural} in {where}")
    except urllib.error.HTTPError as error:
        why = hint if error.code == 404 else error.read().decode(errors="replace")
        sys.exit(f"cannot list {plural} in {where} ({error.code}): {why}")


def main(address: str, namespaces: list[str]) -> None:
    """All checks; a check whose failure explains later ones comes first."""
    wait_until_ready(address)
    check_metrics(address)
    print(f"ok  {address} is ready and has metrics")
    places: list[str | None] = [*namespaces] or [None]
    for namespace in places:
        for kind, hint in _KINDS.items():
            check_list(kind, hint, namespace)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
