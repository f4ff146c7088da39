"""How an update of vLLM's weights begins."""

from trainsync.weights.staging.index import StagedReference


def session_of(staged: StagedReference) -> str:
    """The call of vLLM that begins a version's update, which tells its engine of a draft model."""
    return "start_draft_weight_update" if staged.draft else "start_weight_update"
