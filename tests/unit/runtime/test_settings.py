"""`read_settings`: a run on Kubernetes, a local run, and environments that are neither."""

from pathlib import Path

import pytest
from trainsync.api.spec import SaveStrategy, SyncMethod, SyncStyle, Verify
from trainsync.runtime import sync_store
from trainsync.runtime.errors import SettingsError
from trainsync.runtime.settings import read_settings
from trainsync.runtime.sync_store import SyncStore
from trainsync.storage.objects.opening import StoreOptions
from trainsync.weights.pacing.policy import SyncPolicy

CLUSTER = {
    "TRAINSYNC_RUN_NAME": "run",
    "TRAINSYNC_RUN_NAMESPACE": "ns",
    "TRAINSYNC_RUN_UID": "0b0e",
    "TRAINSYNC_CLUSTER": "main",
    "TRAINSYNC_GROUP": "trainer",
    "TRAINSYNC_ROLE": "Trainer",
    "TRAINSYNC_ATTEMPT": "3",
    "TRAINSYNC_MONITOR_URL": "http://run-monitor.ns.svc:8080",
    "TRAINSYNC_TOKEN_FILE": "/var/run/secrets/trainsync/token",
    "TRAINSYNC_CHECKPOINT_DIR": "/trainsync/checkpoints/run",
    "TRAINSYNC_CHECKPOINT_INTERVAL": "5",
    "TRAINSYNC_CHECKPOINT_MAX_TO_KEEP": "2",
    "TRAINSYNC_CHECKPOINT_SAVE_STRATEGY": "single_node",
    "TRAINSYNC_CHECKPOINT_VERIFY": "digest",
    "TRAINSYNC_CHECKPOINT_MEMORY": "2Ti",
    "TRAINSYNC_CHECKPOINT_MEMORY_DIR": "/trainsync/kept",
    "TRAINSYNC_CHECKPOINT_MEMORY_COPIES": "1",
    "TRAINSYNC_SYNC_METHOD": "memory",
    "TRAINSYNC_SYNC_INTERVAL": "4",
    "TRAINSYNC_SYNC_TIMEOUT_SECONDS": "60",
    "TRAINSYNC_SYNC_BUCKET_SIZE": "2Mi",
    "TRAINSYNC_SYNC_STYLE": "fully_async",
    "TRAINSYNC_SYNC_OFFSET": "0",
    "TRAINSYNC_SYNC_MAX_STALENESS": "5",
    "TRAINSYNC_LOG_LEVEL": "info",
    "TRAINSYNC_SERVER_URLS": "rollout=http://run-server-rollout.ns.svc:8000",
}


def test_a_pods_environment_is_read_in_full() -> None:
    settings = read_settings(CLUSTER)
    assert not settings.is_local
    assert (settings.run, settings.namespace, settings.uid) == ("run", "ns", "0b0e")
    assert (settings.cluster, settings.attempt, settings.incarnation) == ("main", 3, None)
    assert settings.directory == Path("/trainsync/checkpoints/run")
    assert settings.monitor_url == "http://run-monitor.ns.svc:8080"
    assert settings.token_file == Path("/var/run/secrets/trainsync/token")
    checkpoint, sync = settings.checkpoint, settings.sync
    assert (checkpoint.interval, checkpoint.max_to_keep, checkpoint.verify) == (5, 2, Verify.DIGEST)
    assert checkpoint.save_strategy is SaveStrategy.SINGLE_NODE
    assert settings.memory_place is not None
    guests = settings.memory_place.guests
    assert guests is not None
    assert settings.memory_place.budget + guests.budget == 2 << 40
    assert settings.memory_place.directory.is_relative_to("/trainsync/kept")
    assert (sync.method, sync.interval, sync.timeout) == (SyncMethod.MEMORY, 4, 60.0)
    assert sync.policy(batches_per_step=3) == SyncPolicy(
        SyncStyle.FULLY_ASYNC, interval=4, max_staleness=5, batches_per_step=3, timeout=60.0
    )


def test_an_empty_environment_is_a_local_run_with_the_defaults_of_the_resource(
    tmp_path: Path,
) -> None:
    settings = read_settings({}, tmp_path / "my-run")
    assert settings.is_local
    assert (settings.run, settings.directory) == ("my-run", tmp_path / "my-run")
    assert (settings.attempt, settings.incarnation) == (None, None)
    assert (settings.checkpoint.interval, settings.checkpoint.max_to_keep) == (100, None)
    assert settings.checkpoint.save_strategy is SaveStrategy.UNRESTRICTED
    assert settings.sync.policy() == SyncPolicy(SyncStyle.FIXED)
    assert settings.memory_place is None


def test_a_local_run_keeps_shards_in_the_machines_memory(tmp_path: Path) -> None:
    place = read_settings({"TRAINSYNC_CHECKPOINT_MEMORY": "64Mi"}, tmp_path).memory_place
    assert place is not None
    assert place.budget == 64 << 20
    assert place.directory.is_relative_to("/dev/shm")
    assert place.guests is None


def test_a_local_run_without_a_directory_is_below_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert read_settings({}).directory == tmp_path / "trainsync-run"


def test_the_environment_names_the_directory_before_the_argument(tmp_path: Path) -> None:
    environ = {"TRAINSYNC_CHECKPOINT_DIR": str(tmp_path / "a")}
    assert read_settings(environ, tmp_path / "b").directory == tmp_path / "a"


@pytest.mark.parametrize("environ", [CLUSTER, {}], ids=["cluster", "local"])
def test_another_process_reads_the_same_from_what_environment_gives(
    environ: dict[str, str], tmp_path: Path
) -> None:
    joined = environ | {"TRAINSYNC_ATTEMPT": "3", "TRAINSYNC_INCARNATION": "abcdef0123456789"}
    settings = read_settings(joined, tmp_path)
    assert read_settings(settings.environment()) == settings


@pytest.mark.parametrize(
    "name",
    ["RUN_NAME", "RUN_NAMESPACE", "RUN_UID", "CLUSTER", "ATTEMPT", "CHECKPOINT_DIR"],
)
def test_a_missing_variable_is_named(name: str) -> None:
    environ = {k: v for k, v in CLUSTER.items() if k != f"TRAINSYNC_{name}"}
    with pytest.raises(SettingsError, match=f"TRAINSYNC_{name} is not set"):
        read_settings(environ)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("ATTEMPT", "-1"),
        ("ATTEMPT", "one"),
        ("CHECKPOINT_INTERVAL", "0"),
        ("CHECKPOINT_MAX_TO_KEEP", "0"),
        ("CHECKPOINT_VERIFY", "hope"),
        ("CHECKPOINT_SAVE_STRATEGY", "one_by_one"),
        ("CHECKPOINT_MEMORY", "much"),
        ("CHECKPOINT_MEMORY", "0"),
        ("CHECKPOINT_MEMORY_COPIES", "2"),
        ("SYNC_METHOD", "pigeon"),
        ("SYNC_INTERVAL", "1.5"),
        ("SYNC_TIMEOUT_SECONDS", "-3"),
        ("SYNC_BUCKET_SIZE", "1000"),
        ("SYNC_BUCKET_SIZE", "1Ti"),
        ("SYNC_BUCKET_SIZE", "much"),
        ("SYNC_DELTA", "1"),
        ("SYNC_STYLE", "hasty"),
        ("SYNC_OFFSET", "-1"),
        ("SYNC_MAX_STALENESS", "old"),
    ],
)
def test_a_value_that_cannot_be_read_is_named(name: str, value: str) -> None:
    with pytest.raises(SettingsError, match=f"TRAINSYNC_{name} is '{value}'; expected"):
        read_settings(CLUSTER | {f"TRAINSYNC_{name}": value})


def test_copies_of_what_is_not_kept_are_refused(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="nothing is kept in memory that could be copied"):
        read_settings({"TRAINSYNC_CHECKPOINT_MEMORY_COPIES": "1"}, tmp_path)


def test_a_style_whose_numbers_do_not_fit_is_refused_as_the_api_server_does() -> None:
    with pytest.raises(SettingsError, match=r"SYNC_STYLE is 'fully_async'.*at least interval - 1"):
        read_settings(CLUSTER | {"TRAINSYNC_SYNC_MAX_STALENESS": "2"})


def test_deltas_are_refused_with_a_method_that_has_none() -> None:
    delta = {"TRAINSYNC_SYNC_DELTA": "true"}
    with pytest.raises(SettingsError, match=r"SYNC_DELTA is set, and .* 'checkpoint', whose"):
        read_settings(CLUSTER | delta | {"TRAINSYNC_SYNC_METHOD": "checkpoint"})
    for method in ("memory", "nccl"):
        settings = read_settings(CLUSTER | delta | {"TRAINSYNC_SYNC_METHOD": method})
        assert settings.sync.delta
        assert settings.environment()["TRAINSYNC_SYNC_DELTA"] == "true"


@pytest.mark.parametrize("place", ["runs/a", "s3://bucket/runs/a"])
def test_incremental_saves_are_asked_for_and_go_on_to_other_processes(place: str) -> None:
    settings = read_settings({"TRAINSYNC_CHECKPOINT_INCREMENTAL": "true"}, place)
    assert settings.checkpoint.incremental
    assert settings.environment()["TRAINSYNC_CHECKPOINT_INCREMENTAL"] == "true"
    assert not read_settings({}, place).checkpoint.incremental


@pytest.mark.parametrize("run", [CLUSTER, {}])
def test_warm_spares_are_asked_for_and_the_question_goes_on_to_other_processes(
    run: dict[str, str],
) -> None:
    settings = read_settings({**run, "TRAINSYNC_WARM_SPARE": "true"})
    assert settings.warm_spare
    assert settings.environment()["TRAINSYNC_WARM_SPARE"] == "true"
    assert not read_settings(run).warm_spare
    with pytest.raises(SettingsError, match="TRAINSYNC_WARM_SPARE"):
        read_settings({**run, "TRAINSYNC_WARM_SPARE": "yes"})


@pytest.mark.parametrize("run", [CLUSTER, {}])
def test_the_wait_for_another_pod_goes_on_to_other_processes(run: dict[str, str]) -> None:
    settings = read_settings({**run, "TRAINSYNC_POD_REPLACEMENT_SECONDS": "90"})
    assert settings.pod_replacement_seconds == 90
    assert settings.environment()["TRAINSYNC_POD_REPLACEMENT_SECONDS"] == "90"
    assert read_settings(run).pod_replacement_seconds == 0
    with pytest.raises(SettingsError, match="TRAINSYNC_POD_REPLACEMENT_SECONDS"):
        read_settings({**run, "TRAINSYNC_POD_REPLACEMENT_SECONDS": "soon"})


STORE = {
    "TRAINSYNC_SYNC_METHOD": "store",
    "TRAINSYNC_SYNC_STORE_URL": "s3://bucket/runs/a/",
    "TRAINSYNC_SYNC_STORE_ENDPOINT": "http://s3:7070",
    "TRAINSYNC_SYNC_STORE_REGION": "eu",
    "TRAINSYNC_SYNC_STORE_ALLOW_HTTP": "true",
}


@pytest.mark.parametrize("run", [CLUSTER, {}])
def test_weights_may_go_through_a_store_whose_keys_stay_in_the_environment(
    run: dict[str, str], tmp_path: Path
) -> None:
    keys = {"TRAINSYNC_SYNC_STORE_AWS_ACCESS_KEY_ID": "a-key"}
    settings = read_settings(run | STORE | keys, tmp_path / "run")
    assert settings.sync.method is SyncMethod.STORE
    assert settings.sync.store == SyncStore("s3://bucket/runs/a", "http://s3:7070", "eu", True)
    assert read_settings(run | settings.environment(), tmp_path / "run") == settings
    assert "a-key" not in repr(settings)


def test_a_store_of_weights_is_opened_with_its_own_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "of-the-users-code")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(f"TRAINSYNC_SYNC_STORE_{name}", f"own-{name}")
    seen: list[StoreOptions] = []

    def opened(url: str, options: StoreOptions) -> None:
        assert url == "s3://bucket/runs/a"
        seen.append(options)

    monkeypatch.setattr(sync_store, "open_store", opened)
    store = read_settings(STORE).sync.store
    assert store is not None
    store.open(5.0)
    (options,) = seen
    assert options.credentials == {
        "aws_access_key_id": "own-AWS_ACCESS_KEY_ID",
        "aws_secret_access_key": "own-AWS_SECRET_ACCESS_KEY",
    }
    assert (options.endpoint, options.region, options.allow_http) == ("http://s3:7070", "eu", True)
    limits = options.limits
    assert max(limits.call_seconds, limits.transfer_seconds, limits.retry_seconds) <= 5.0


@pytest.mark.parametrize(
    ("more", "match"),
    [
        ({"TRAINSYNC_SYNC_STORE_URL": ""}, "SYNC_STORE_URL is not set, though variables of that"),
        ({"TRAINSYNC_SYNC_METHOD": "nccl"}, "'nccl', which uses no store"),
        ({"TRAINSYNC_SYNC_DELTA": "true"}, "SYNC_DELTA is set, .* deltas of its own"),
        ({"TRAINSYNC_SYNC_STORE_ALLOW_HTTP": "yes"}, "ALLOW_HTTP is 'yes'; expected true or false"),
        ({"TRAINSYNC_SYNC_STORE_URL": "bucket/a"}, "SYNC_STORE_URL: bucket/a is no URL"),
        ({"TRAINSYNC_SYNC_STORE_URL": "s3://key:word@bucket/a"}, "credentials are refused"),
    ],
)
def test_a_store_of_weights_that_cannot_be_is_refused(more: dict[str, str], match: str) -> None:
    with pytest.raises(SettingsError, match=match) as refused:
        read_settings(STORE | more)
    assert "word" not in str(refused.value)


def test_the_method_store_needs_one() -> None:
    with pytest.raises(SettingsError, match="'store', and TRAINSYNC_SYNC_STORE_URL is not set"):
        read_settings(CLUSTER | {"TRAINSYNC_SYNC_METHOD": "store"})


def test_half_an_environment_is_not_taken_for_a_local_run() -> None:
    environ = {k: v for k, v in CLUSTER.items() if k != "TRAINSYNC_MONITOR_URL"}
    with pytest.raises(SettingsError, match="TRAINSYNC_MONITOR_URL is not"):
        read_settings(environ)


@pytest.mark.parametrize("name", ["TRAINSYNC_ATTEMPT", "TRAINSYNC_INCARNATION"])
def test_a_local_run_is_joined_with_both_or_neither(name: str) -> None:
    with pytest.raises(SettingsError, match="come together"):
        read_settings({name: "12345678"})


@pytest.mark.parametrize("by_argument", [True, False])
def test_a_local_runs_checkpoints_may_be_in_a_store(by_argument: bool) -> None:
    url = "s3://bucket/runs/a"
    environ = {} if by_argument else {"TRAINSYNC_CHECKPOINT_DIR": f"{url}/"}
    settings = read_settings(environ, url if by_argument else None)
    assert (settings.run, settings.store) == ("a", url)
    assert settings.environment()["TRAINSYNC_CHECKPOINT_DIR"] == url
    assert read_settings(settings.environment()) == settings
    other = read_settings({"TRAINSYNC_CHECKPOINT_DIR": "s3://bucket/runs/b"})
    assert settings.directory != other.directory, "processes of two runs are not kept apart"


@pytest.mark.parametrize(
    ("more", "match"),
    [
        ({"TRAINSYNC_CHECKPOINT_DIR": "ftp://bucket/a"}, "no store is opened by ftp://"),
        ({"TRAINSYNC_CHECKPOINT_DIR": "s3://key:word@bucket/a"}, "credentials are refused"),
    ],
)
def test_what_a_store_cannot_do_is_refused(more: dict[str, str], match: str) -> None:
    with pytest.raises(SettingsError, match=match) as refused:
        read_settings({"TRAINSYNC_CHECKPOINT_DIR": "s3://bucket/runs/a"} | more)
    assert "word" not in str(refused.value)


def test_a_training_runs_checkpoints_may_be_in_a_bucket() -> None:
    url = "s3://bucket/runs/a"
    in_bucket = CLUSTER | {"TRAINSYNC_CHECKPOINT_DIR": url}
    settings = read_settings(in_bucket)
    assert (settings.store, settings.is_local) == (url, False)
    there = read_settings(settings.environment() | {"TRAINSYNC_ATTEMPT": "0"})
    assert (there.store, there.directory) == (settings.store, settings.directory)
    assert there.memory_place == settings.memory_place is not None
    assert settings.memory_place.shared == url
    committed = read_settings(in_bucket | {"TRAINSYNC_SYNC_METHOD": "checkpoint"})
    assert (committed.sync.method, committed.store) == (SyncMethod.CHECKPOINT, url)
