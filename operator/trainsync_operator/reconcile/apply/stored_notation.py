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
from trainsync_operator.reconcile.apply.child import differs
from trainsync_operator.reconcile.run import Run


@dataclass
class StoredNotation:
    """Children that an apply has left as they were, though they differ, and those that do not."""

    # By namespace and run, then by child.
    _known: dict[tuple[str, str], dict[tuple[Kind, str], str]] = field(default_factory=dict)
    _same: dict[tuple[str, str], dict[tuple[Kind, str], tuple[str, ...]]] = field(
        default_factory=dict
    )

    def differs(self, run: Run, kind: Kind, live: Object, desired: Object) -> bool:
        """Whether ``desired`` has to be applied, as far as is known."""
        key, child = (run.namespace, run.name), (kind, objects.name(desired))
        meta = objects.metadata(live)
        # To compare field by field takes a fifth of a look, and most children stay as they are.
        pair = (meta["uid"], meta.get("resourceVersion", ""), _hash_of(desired))
        if meta.get("resourceVersion") and self._same.get(key, {}).get(child) == pair:
            return False
        if not differs(live, desired):
            self._same.setdefault(key, {})[child] = pair
            return False
        return self._known.get(key, {}).get(child) != _text_of(live, desired)

    def note(self, run: Run, kind: Kind, live: Object, desired: Object) -> None:
        """An apply of ``desired`` has changed nothing of ``live``."""
        of_run = self._known.setdefault((run.namespace, run.name), {})
        of_run[kind, objects.name(desired)] = _text_of(live, desired)

    def gone(self, namespace: str, run: str) -> None:
        """Forget a run."""
        self._known.pop((namespace, run), None)
        self._same.pop((namespace, run), None)


def _hash_of(desired: Object) -> str:
    return str(objects.metadata(desired)["annotations"][names.ANNOTATION_HASH])


def _text_of(live: Object, desired: Object) -> str:
    """An object as the API server stores it, and the request for it."""
    meta = objects.metadata(live)
    stored = [meta.get(key) for key in ("uid", "generation", "labels", "ownerReferences")]
    return json.dumps([stored, _hash_of(desired)], sort_keys=True)
