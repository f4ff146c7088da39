"""Updates, and dies by kill -9: ``killed_driver.py URL VERSION INDEX DIGEST CALL before|after``."""

import os
import signal
import sys

import httpx
from trainsync.engines.servers.vllm import VLLMServer
from trainsync.weights.staging.index import StagedReference


class Killing(httpx.HTTPTransport):
    """Kills this process before it sends a call, or when the answer is there."""

    def __init__(self, call: str, moment: str) -> None:
        super().__init__()
        self._call = call
        self._moment = moment

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        """See `httpx.BaseTransport`."""
        struck = request.url.path == self._call
        if struck and self._moment == "before":
            os.kill(os.getpid(), signal.SIGKILL)
        answer = super().handle_request(request)
        if struck:
            os.kill(os.getpid(), signal.SIGKILL)
        return answer


if __name__ == "__main__":
    url, version, index, digest, call, moment = sys.argv[1:]
    driver = VLLMServer(url, transport=Killing(call, moment))
    driver.update(int(version), StagedReference(index, digest))
