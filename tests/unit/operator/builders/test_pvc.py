"""A run's claim."""

from typing import Any

from trainsync_operator.builders import (
    pvc,
)

from tests.unit.operator.builders.built import target
from tests.unit.operator.support import UID, spec


def test_a_claim_that_is_there_keeps_its_spec_and_its_hash() -> None:
    wanted = target(spec(checkpoint={"storage": {"volumeClaimTemplate": {"size": "5Gi"}}}))
    grown = {"resources": {"requests": {"storage": "9Gi"}}, "accessModes": ["ReadWriteMany"]}
    claim = pvc.build(wanted, {"spec": {**grown, "volumeName": "pv-1"}})
    fresh = pvc.build(wanted)
    assert claim is not None
    assert fresh is not None
    assert claim["spec"] == grown
    assert claim["metadata"] == fresh["metadata"], "nothing to apply"


def test_a_claim_is_made_from_the_template_and_none_for_an_existing_one() -> None:
    assert pvc.build(target()) is None
    template = {"size": "5Gi", "storageClassName": "fast"}
    claim = pvc.build(target(spec(checkpoint={"storage": {"volumeClaimTemplate": template}})))
    assert claim is not None
    assert claim["metadata"]["name"] == "tiny-checkpoints"
    assert claim["spec"] == {
        "accessModes": ["ReadWriteMany"],
        "resources": {"requests": {"storage": "5Gi"}},
        "storageClassName": "fast",
    }


def test_a_claim_has_no_owner_unless_it_is_to_be_deleted_with_the_run() -> None:
    def claim(**more: str) -> dict[str, Any]:
        template = {"size": "5Gi", **more}
        made = pvc.build(target(spec(checkpoint={"storage": {"volumeClaimTemplate": template}})))
        assert made is not None
        metadata: dict[str, Any] = made["metadata"]
        return metadata

    kept, deleted = claim(), claim(retentionPolicy="Delete")
    assert "ownerReferences" not in kept
    assert [owner["uid"] for owner in deleted["ownerReferences"]] == [UID]
    assert kept["annotations"] != deleted["annotations"], "a change is applied"
