"""Each wrong setting is refused in one sentence that names it."""

from pathlib import Path

import pytest
from trainsync.agent.__main__ import main
from trainsync.agent.checks import AgentSettingsError
from trainsync.agent.settings import read_settings
from trainsync.api import env
from trainsync.runtime.sync_store import SyncStore

_GOOD = ("--server=http://127.0.0.1:8000", "--directory=/runs/mine")
_MONITOR = ("--monitor=http://run-monitor:8080/", "--token-file=/token", "--servers=rollouts")


def test_options_win_over_variables_and_variables_over_defaults() -> None:
    environ = {
        "TRAINSYNC_AGENT_SERVER": "http://localhost:9000/",
        "TRAINSYNC_CHECKPOINT_DIR": "/runs/mine",
        "TRAINSYNC_SYNC_INTERVAL": "5",
        "TRAINSYNC_AGENT_SERVE_BEFORE_FIRST_VERSION": "true",
        "TRAINSYNC_AGENT_PROOF": "required",
        "TRAINSYNC_AGENT_ENGINE": "sglang",
        "TRAINSYNC_AGENT_SGLANG_ROUTE": "tensor",
        "TRAINSYNC_POD_NAME": "server-0",
    }
    settings = read_settings([], environ)
    assert settings.server == "http://localhost:9000"
    assert settings.directory == Path("/runs/mine")
    assert settings.max_staleness == 5
    assert settings.serve_before_first
    assert settings.proof == "required"
    assert (settings.engine, settings.sglang_route) == ("sglang", "tensor")
    assert read_settings(["--sglang-route=distributed"], environ).sglang_route == "distributed"
    assert (read_settings(_GOOD, {}).engine, read_settings(_GOOD, {}).sglang_route) == (
        "vllm",
        "disk",
    )
    assert (settings.host, settings.port) == ("127.0.0.1", 8090)
    assert settings.name == "agent-server-0"
    environ["TRAINSYNC_SYNC_MAX_STALENESS"] = "7"
    assert read_settings([], environ).max_staleness == 7
    assert read_settings(["--max-staleness=0"], environ).max_staleness == 0
    assert read_settings(_GOOD, {}).max_staleness == 1
    assert read_settings(_GOOD, {}).proof == "if-present"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ((_GOOD[0],), "--directory .*, or --store .*, is not given"),
        ((*_GOOD, "--store=s3://bbb/runs/a"), "--directory and --store are both given"),
        ((_GOOD[0], "--directory=s3://k:secret@bbb/a"), "--directory: s3://…: credentials are"),
        ((_GOOD[0], "--store=/runs/mine"), "--store: /runs/mine is no URL of a store"),
        ((_GOOD[0], "--store=s3://k:secret@bbb/a"), "--store: s3://…: credentials are refused"),
        ((_GOOD[1],), "--server .* is not given"),
        ((_GOOD[1], "--server=127.0.0.1:8000"), "--server is '127.0.0.1:8000', expected"),
        ((_GOOD[1], "--server=http://a:b"), "--server is"),
        ((_GOOD[1], "--server=http://a:80/v1"), "--server is"),
        ((_GOOD[1], "--server= http://a:80"), "--server is ' http://a:80', expected"),
        ((_GOOD[1], "--server=http://a:80\n"), "--server is"),
        ((_GOOD[1], "--server=http://a b:80"), "--server is"),
        ((_GOOD[1], "--server=http://a:80#x"), "--server is"),
        ((_GOOD[1], "--server=http://a:80?"), "--server is"),
        ((_GOOD[1], "--server=http://a..b:80"), "--server is"),
        ((_GOOD[0], "--directory=/etc/passwd"), "which is no directory"),
        ((*_GOOD, "--max-staleness=-1"), "--max-staleness is '-1', expected a whole number"),
        ((*_GOOD, "--timeout=0"), "--timeout is '0'"),
        ((*_GOOD, f"--timeout={'9' * 5000}"), "at least 1 and at most 18 digits"),
        ((*_GOOD, "--port=65536"), "--port is '65536'.*at most 65535"),
        ((*_GOOD, "--host=localhost"), "--host is 'localhost', expected an IP address"),
        ((*_GOOD, "--pause=stop"), "--pause is 'stop', expected one of keep, wait, abort"),
        ((*_GOOD, "--engine=tgi"), "--engine is 'tgi', expected one of vllm, sglang"),
        ((*_GOOD, "--engine=sglang", "--pause=wait"), "'wait', expected one of keep, abort"),
        ((*_GOOD, "--sglang-route=tensor"), "is tensor, expected --engine sglang: vllm has no su"),
        ((*_GOOD, "--engine=sglang", "--sglang-route=ipc"), "one of disk, tensor, distributed"),
        ((*_GOOD, "--proof=no"), "--proof is 'no', expected one of if-present, required"),
        ((*_GOOD, "--dtype=int8"), "--dtype is 'int8'"),
        ((*_GOOD, "--memory=/no/such/place"), "--memory is /no/such/place"),
        ((*_GOOD, "--log-level=loud"), "--log-level is 'loud'"),
        ((*_GOOD, "--sever=x"), "unrecognized arguments: --sever=x"),
    ],
)
def test_what_is_wrong_is_named(
    options: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(AgentSettingsError, match=message):
        read_settings(options, {})
    assert main(options) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_versions_come_from_a_directory_or_a_store_and_an_option_decides() -> None:
    of_store = {
        "TRAINSYNC_SYNC_STORE_URL": "s3://bucket/runs/a",
        "TRAINSYNC_SYNC_STORE_ENDPOINT": "https://s3.example.com",
        "TRAINSYNC_SYNC_STORE_REGION": "eu-1",
        "TRAINSYNC_SYNC_STORE_ALLOW_HTTP": "true",
        "TRAINSYNC_SYNC_STORE_AWS_ACCESS_KEY_ID": "key",
    }
    expected = SyncStore("s3://bucket/runs/a", "https://s3.example.com", "eu-1", allow_http=True)
    found = read_settings(_GOOD[:1], of_store)
    assert (found.directory, found.store) == (None, expected)
    assert read_settings([_GOOD[0], "--store=s3://bbb/x"], {}).store == SyncStore("s3://bbb/x")
    both = of_store | {"TRAINSYNC_CHECKPOINT_DIR": "/runs/other"}
    with pytest.raises(AgentSettingsError, match=r"CHECKPOINT_DIR and .*STORE_URL are both given"):
        read_settings(_GOOD[:1], both)
    found = read_settings(_GOOD, both)
    assert (found.directory, found.store) == (Path("/runs/mine"), None)
    found = read_settings([_GOOD[0], "--directory=s3://bbb/runs/a/"], both)
    assert (found.directory, found.bucket, found.store) == (None, "s3://bbb/runs/a", None)
    chosen = read_settings([_GOOD[0], "--store=s3://bbb/x"], both).store
    assert chosen is not None
    assert chosen.url == "s3://bbb/x"


def test_a_misspelt_variable_is_refused() -> None:
    with pytest.raises(AgentSettingsError, match="TRAINSYNC_AGENT_SERVER was meant"):
        read_settings(_GOOD, {"TRAINSYNC_AGENT_SERVERS": "http://127.0.0.1:8000"})


def test_a_monitor_is_used_where_its_token_and_the_servers_are_named_too() -> None:
    assert read_settings(_GOOD, {}).rendezvous is None
    found = read_settings([*_GOOD, *_MONITOR], {}).rendezvous
    assert found is not None
    assert (found.monitor, found.servers) == ("http://run-monitor:8080", "rollouts")
    environ = {
        "TRAINSYNC_MONITOR_URL": "http://run-monitor:8080",
        "TRAINSYNC_TOKEN_FILE": "/token",
        "TRAINSYNC_SERVERS": "rollouts",
        "TRAINSYNC_AGENT_ENDPOINT": "http://10.0.0.1:8000",
    }
    found = read_settings(_GOOD, environ).rendezvous
    assert found is not None
    assert (found.token_file, found.endpoint) == (Path("/token"), "http://10.0.0.1:8000")


@pytest.mark.parametrize(
    ("host", "endpoint"),
    [
        ("10.0.0.1", "http://10.0.0.1:8000"),
        ("fd00::1", "http://[fd00::1]:8000"),
        ("127.0.0.1", None),
        ("0.0.0.0", None),
    ],
)
def test_clients_are_told_of_the_server_at_the_agents_own_address(
    host: str, endpoint: str | None
) -> None:
    found = read_settings([*_GOOD, *_MONITOR, "--host", host], {}).rendezvous
    assert found is not None
    assert found.endpoint == endpoint


def test_the_token_of_a_ray_pod_is_not_shown_to_the_monitor_as_a_servers() -> None:
    environ = {"TRAINSYNC_MONITOR_URL": "http://run-monitor:8080", "TRAINSYNC_TOKEN_FILE": "/t"}
    assert read_settings(_GOOD, environ).rendezvous is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (_MONITOR[:1], "--token-file and --servers not given"),
        (_MONITOR[:2], "--servers not given"),
        (_MONITOR[1:], "--monitor not given"),
        (("--endpoint=http://me",), "--monitor and --token-file and --servers not given"),
        ((*_MONITOR, "--servers=Not A Name"), "--servers is 'Not A Name'"),
        ((*_MONITOR, "--monitor=run-monitor"), "--monitor is 'run-monitor'"),
        ((*_MONITOR, "--endpoint=me"), "--endpoint is 'me'"),
    ],
)
def test_a_monitor_that_is_half_named_is_refused(options: tuple[str, ...], message: str) -> None:
    with pytest.raises(AgentSettingsError, match=message):
        read_settings([*_GOOD, *options], {})


def test_an_adapter_is_read_with_its_configuration(tmp_path: Path) -> None:
    file = tmp_path / "adapter_config.json"
    file.write_text('{"peft_type": "LORA", "r": 4}')
    both = ("--adapter=mine", f"--adapter-config={file}")
    adapter = read_settings([*_GOOD, *both], {}).adapter
    assert adapter is not None
    assert (adapter.name, adapter.rank) == ("mine", 4)
    assert read_settings(_GOOD, {}).adapter is None
    content = file.read_text()
    for options, variables in (
        ((both[0], f"--adapter-config={content}"), {}),
        ((), {env.AGENT_ADAPTER: "mine", env.AGENT_ADAPTER_CONFIG: f" {content}"}),
        ((), {env.AGENT_ADAPTER: "mine", env.AGENT_ADAPTER_CONFIG: str(file)}),
    ):
        assert read_settings([*_GOOD, *options], variables).adapter == adapter
    for options, message in (
        (both[:1], "--adapter and --adapter-config are given together"),
        (both[1:], "--adapter and --adapter-config are given together"),
        ((both[0], "--adapter-config=/missing"), "--adapter-config: /missing cannot be read"),
        ((both[0], "--adapter-config={"), "--adapter-config: the text cannot be read"),
        ((both[0], '--adapter-config={"r": 4}'), "--adapter-config: the text is no adapter_config"),
        ((*both, "--engine=sglang"), "--engine sglang is not supported beside --adapter"),
        ((*both, "--prepare-seconds=9"), "--prepare-seconds is not supported beside --adapter"),
        ((*both, "--other-hosts=http://b:1"), "--other-hosts is not supported beside --adapter"),
    ):
        with pytest.raises(AgentSettingsError, match=message):
            read_settings([*_GOOD, *options], {})
