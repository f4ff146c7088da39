"""Where a run's inference servers are, as the environment says."""

import pytest
from trainsync.runtime.errors import SettingsError
from trainsync.runtime.servers import InferenceServers, read_servers, write_servers

URLS = "rollout=http://127.0.0.1:8000, judge=https://judge.example:8443/"


def test_each_entry_has_its_address() -> None:
    assert read_servers({"TRAINSYNC_SERVER_URLS": URLS}) == (
        InferenceServers("rollout", "http://127.0.0.1:8000"),
        InferenceServers("judge", "https://judge.example:8443"),
    )


def test_a_run_without_servers_has_none() -> None:
    assert read_servers({}) == ()
    assert write_servers([]) is None


def test_what_is_written_is_read_again() -> None:
    servers = read_servers({"TRAINSYNC_SERVER_URLS": URLS})
    written = write_servers(servers)
    assert written is not None
    assert read_servers({"TRAINSYNC_SERVER_URLS": written}) == servers


@pytest.mark.parametrize(
    "text",
    ["http://127.0.0.1:8000", "rollout=127.0.0.1:8000", "=http://a", "a=http://[::1", "a=http://"],
)
def test_what_is_no_name_and_address_is_refused(text: str) -> None:
    with pytest.raises(SettingsError, match="expected such as rollout=http"):
        read_servers({"TRAINSYNC_SERVER_URLS": text})


def test_two_entries_of_one_name_are_refused() -> None:
    with pytest.raises(SettingsError, match="each name once"):
        read_servers({"TRAINSYNC_SERVER_URLS": "a=http://x,a=http://y"})
