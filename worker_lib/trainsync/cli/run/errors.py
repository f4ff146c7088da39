"""Errors of the cluster, in sentences that name the remedy."""

from typing import Final

from trainsync.api import names
from trainsync.cli.output.console import REFUSED, USAGE, CommandError

INSTALL_HINT: Final = (
    "`trainsync run` needs the Kubernetes client, which is not installed: "
    "in a clone of trainsync, pip install '.[cli]'"
)


class ClusterError(CommandError):
    """The API server was not reached, or refused."""


class NotReachedError(ClusterError):
    """The API server did not answer in time, or cannot now; it may a moment later."""


class MissingError(ClusterError):
    """There is no such thing."""


def not_reached(host: str, why: str) -> NotReachedError:
    """No answer from ``host``."""
    return NotReachedError(
        f"the API server at {host} does not answer ({why}): is the cluster up, and is this "
        "kubeconfig (KUBECONFIG, --kubeconfig, --context) the right one?",
    )


def refused(status: int, said: str, what: str, namespace: str, doing: str = "read") -> ClusterError:
    """The API server answered ``status`` to a request to read, or change, ``what``."""
    if status == 401:
        return ClusterError(
            f"the API server does not accept your credentials ({said}): log in again, or give "
            "another --context"
        )
    if status == 403:
        return ClusterError(
            f"you may not {doing} {what} in namespace {namespace} ({said}): give another "
            f"--namespace, or ask the cluster's administrator for the right"
        )
    if status == 404:
        return MissingError(f"{what}: not found in namespace {namespace} ({said})", USAGE)
    sentence = f"the API server answers {status} to a request for {what}: {said}"
    if status == 429 or status >= 500:
        return NotReachedError(sentence)
    return ClusterError(sentence)


def not_installed(context: str) -> ClusterError:
    """The cluster knows no TrainingRuns."""
    return ClusterError(
        f"the cluster of context {context} has no {names.PLURAL}.{names.GROUP}: trainsync is not "
        "installed in it (helm install, see docs/install.md), or this is another cluster than "
        "you mean (--context)",
        REFUSED,
    )
