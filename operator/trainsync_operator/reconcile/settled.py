"""Fields that the API server stores in another notation than the request has.

It drops a ``null`` or a field that the CRD lacks, and writes an amount in its own words: such an
object differs from the desired one for ever, and would be applied at each look.
"""

import json
from dataclasses import dataclass, field

from trainsync.api import names

from trainsync_operator.kube import objects
from trainsync_operator.kube.kinds import Kind
from trainsync_operator.kube.objects import Object
from trainsync_operator.reconcile.apply import differs
from trainsync_operator.reconcile.run import Run


@dataclass
class Settled:
    """Children that an apply has left as they were, though they differ."""

    # By namespace and run, then by child.
    _known: dict[tuple[str, str], dict[tuple[Kind, str], str]] = field(default_factory=dict)

    def differs(self, run: Run, kind: Kind, live: Object, desired: Object) -> bool:
        """Whether ``desired`` has to be applied, as far as is known."""
        known = self._known.get((run.namespace, run.name), {}).get((kind, objects.name(desired)))
        return differs(live, desired) and known != _text_of(live, desired)

    def note(self, run: Run, kind: Kind, live: Object, desired: Object) -> None:
        """An apply of ``desired`` has changed nothing of ``live``."""
        of_run = self._known.setdefault((run.namespace, run.name), {})
        of_run[kind, objects.name(desired)] = _text_of(live, desired)

    def gone(self, namespace: str, run: str) -> None:
        """Forget a run."""
        self._known.pop((namespace, run), None)


def _text_of(live: Object, desired: Object) -> str:
    """An object as the API server stores it, and the request for it."""
    meta = objects.metadata(live)
    stored = [meta.get(key) for key in ("uid", "generation", "labels", "ownerReferences")]
    asked = objects.metadata(desired)["annotations"][names.ANNOTATION_HASH]
    return json.dumps([stored, asked], sort_keys=True)
