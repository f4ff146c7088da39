"""Which run an object belongs to, by its name: objects that are gone have no labels any more. Pure.

The names are those of `trainsync.api.names`, and what KubeRay and Kubernetes hang behind them.
"""

import re
from collections.abc import Iterable

from trainsync.api import names


def owns(run: str, clusters: Iterable[str], name: str) -> bool:
    """Whether an object of this name may be a child, or a child's child, of the run."""
    if name in (run, names.claim_name(run)):
        return True
    monitor = names.monitor_name(run)
    if name == monitor or re.fullmatch(rf"{re.escape(monitor)}-[a-z0-9]+(-[a-z0-9]+)?", name):
        return True
    kinds = "|".join(re.escape(cluster) for cluster in clusters)
    if not kinds:
        return False
    return re.fullmatch(rf"{re.escape(run)}-({kinds})-\d{{1,3}}(-.*)?", name) is not None


def belongs(run: str, clusters: Iterable[str], others: Iterable[str], name: str) -> bool:
    """As `owns`, unless the name begins with that of another run, which is longer."""
    if not owns(run, clusters, name):
        return False
    longer = (other for other in others if len(other) > len(run))
    return not any(name == other or name.startswith(f"{other}-") for other in longer)
