"""Weights pickled through an RPC of vLLM: what a training loop does that has no transfer engine.

The trainer pauses the server, sends buckets of pickled tensors in base64 by ``/collective_rpc``
(its arguments are JSON), and resumes. Each worker loads a bucket as it comes, between the first and
the last step of vLLM's own layerwise reload, which also packs the weights for the CPU.
"""

import base64
import pickle
import time
from collections.abc import Iterator, Mapping
from contextlib import closing
from http import HTTPStatus
from http.client import HTTPConnection
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

import torch

BUCKET_BYTES: Final = 16 << 20
"""Larger ones do not fit into vLLM's ring of shared memory between engine and workers."""
OPTIONS: Final = ("--worker-extension-cls", f"{Path(__file__).stem}.PickledWeights")
"""Of ``vllm serve``, with this file's folder in its ``PYTHONPATH``."""


def send(url: str, weights: Mapping[str, torch.Tensor], timeout: float) -> float:
    """Load ``weights`` into a server. Returns seconds from pause to resume, all of it in the pause.

    Raises:
        OSError, RuntimeError: a call failed.
    """
    started = time.perf_counter()
    # Not httpx: it copies what is left of a body after each piece that the system takes.
    with closing(HTTPConnection(urlsplit(url).netloc, timeout=timeout)) as client:
        _post(client, "/pause?mode=keep")
        _post(client, "/collective_rpc", b'{"method": "begin_pickled_weights"}')
        for bucket in _buckets(weights):
            # Put together by hand: base64 needs no escapes, which json.dumps would look for.
            said = base64.b64encode(pickle.dumps(bucket, pickle.HIGHEST_PROTOCOL))
            body = b'{"method": "load_pickled_weights", "args": ["' + said + b'"]}'
            _post(client, "/collective_rpc", body)
        _post(client, "/collective_rpc", b'{"method": "end_pickled_weights"}')
        _post(client, "/resume")
    return time.perf_counter() - started


def _post(client: HTTPConnection, path: str, body: bytes | None = None) -> None:
    client.request("POST", path, body)
    answer = client.getresponse()
    said = answer.read()
    if answer.status != HTTPStatus.OK:
        raise RuntimeError(f"{path} answered {answer.status}: {said[:1000]!r}")


def _buckets(weights: Mapping[str, torch.Tensor]) -> Iterator[list[tuple[str, str, Any]]]:
    """Names, dtypes and bytes (numpy, which pickles in one copy), `BUCKET_BYTES` at once.

    A larger tensor is a bucket by itself.
    """
    bucket: list[tuple[str, str, Any]] = []
    size = 0
    for name, tensor in weights.items():
        if bucket and size + tensor.nbytes > BUCKET_BYTES:
            yield bucket
            bucket, size = [], 0
        flat = tensor.view(torch.uint8).numpy()
        bucket.append((name, str(tensor.dtype).removeprefix("torch."), flat))
        size += tensor.nbytes
    if bucket:
        yield bucket


class PickledWeights:
    """Mixed into vLLM's worker, which gives ``model_runner``, ``model_config`` and the rest."""

    model_runner: Any
    model_config: Any
    vllm_config: Any

    def begin_pickled_weights(self) -> None:
        """Begin a reload."""
        from vllm.config import set_current_vllm_config
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        with set_current_vllm_config(self.vllm_config):
            initialize_layerwise_reload(self.model_runner.get_model())

    def load_pickled_weights(self, said: str) -> None:
        """Load a bucket; see `send`."""
        from vllm.config import set_current_vllm_config

        bucket = pickle.loads(base64.b64decode(said))
        weights = [
            (name, torch.from_numpy(flat).view(getattr(torch, dtype)))
            for name, dtype, flat in bucket
        ]
        with set_current_vllm_config(self.vllm_config), torch.no_grad():
            self.model_runner.get_model().load_weights(weights)

    def end_pickled_weights(self) -> None:
        """End a reload: what is derived from the weights is made anew."""
        from vllm.config import set_current_vllm_config
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        with set_current_vllm_config(self.vllm_config):
            finalize_layerwise_reload(self.model_runner.get_model(), self.model_config)
