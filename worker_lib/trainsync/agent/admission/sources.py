"""Readers of an agent's versions, by the agent's settings."""

from trainsync.agent.admission.committed import BucketVersions, CountedReads
from trainsync.agent.admission.reading import CommittedVersions, ReadsVersions
from trainsync.agent.admission.stored import StoredVersions
from trainsync.agent.fellows.objects import FellowsObjects
from trainsync.agent.fellows.reader import FellowsBucketReader, FellowsReader
from trainsync.agent.metrics import AgentMetrics
from trainsync.agent.settings import AgentSettings
from trainsync.runtime.relays.committed_weights import read_stored_weights, read_weights
from trainsync.runtime.sync_store import limits_within
from trainsync.storage.objects.bucket import ObjectBucket
from trainsync.storage.objects.of_run import open_run_store

FellowsReaders = FellowsReader | FellowsBucketReader | FellowsObjects
"""Readers of a directory, of a bucket, of a store."""


def versions_of(
    settings: AgentSettings,
    bucket: ObjectBucket | None,
    fellows: FellowsReaders | None,
    metrics: AgentMetrics,
) -> ReadsVersions:
    """The reader of an agent's versions; without fellows of the place where they were saved.

    Args:
        bucket: of `bucket_of`.

    Raises:
        DeltaError: versions of a store need numba, which is not there.
    """
    required = settings.proof == "required"
    if bucket is not None and settings.store is not None:
        assert fellows is None or isinstance(fellows, FellowsObjects)
        return StoredVersions(bucket, metrics, required=required, fellows=fellows)
    if bucket is not None:
        assert fellows is None or isinstance(fellows, FellowsBucketReader)
        stored = fellows or CountedReads(read_stored_weights, metrics)
        return BucketVersions(bucket, stored, required=required)
    assert settings.directory is not None, "read_settings has seen to it"
    assert fellows is None or isinstance(fellows, FellowsReader)
    read = fellows or read_weights
    return CommittedVersions(settings.directory, settings.name, read, required=required)


def bucket_of(settings: AgentSettings) -> ObjectBucket | None:
    """The bucket that versions are fetched from; None: they come from a directory.

    Raises:
        SettingsError: the store cannot be opened.
    """
    timeout = float(settings.timeout)
    if settings.store is not None:
        return settings.store.open(timeout)
    if settings.bucket is not None:
        return open_run_store(settings.bucket, limits_within(timeout))
    return None
