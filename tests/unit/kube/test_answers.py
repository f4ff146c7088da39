import subprocess
import sys

import pytest
from trainsync.kube.answers import message_in


@pytest.mark.parametrize("body", ['{"message": "no room"}', b'{"message": "no room"}'])
def test_the_sentence_of_the_api_server_is_found(body: str | bytes) -> None:
    assert message_in(body, "Conflict") == "no room"


@pytest.mark.parametrize("body", [None, "", b"", "<html>", b"\xff", "[]", "3", "null", "{}"])
def test_a_body_without_one_gives_the_other(body: str | bytes | None) -> None:
    assert message_in(body, "Conflict") == "Conflict"


def test_reading_answers_does_not_load_kubernetes() -> None:
    code = "import sys, trainsync.kube.answers; sys.exit('kubernetes' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
