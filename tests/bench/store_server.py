"""A bucket on this machine for benchmarks: versitygw, on files in memory."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from devcluster.shell import Progress
from devcluster.tools import ensure_store_servers
from tests.bench.checkpoint.checkpoint_state import scratch
from tests.store.servers.server import ACCESS, REGION, SECRET, serving

BUCKET: Final = "bench"


@contextmanager
def bucket() -> Iterator[str]:
    """The URL of a new bucket, for as long as the body runs.

    From then on the environment of this process, and of its children, has what opens it.
    """
    program = ensure_store_servers(Progress()).path("versitygw")
    with scratch(in_memory=True) as directory, serving(program, directory / "data") as server:
        server.bucket(BUCKET)
        os.environ |= {
            "AWS_ENDPOINT_URL": server.endpoint,
            "AWS_ALLOW_HTTP": "true",
            "AWS_REGION": REGION,
            "AWS_DEFAULT_REGION": REGION,  # as botocore calls it
            "AWS_ACCESS_KEY_ID": ACCESS,
            "AWS_SECRET_ACCESS_KEY": SECRET,
        }
        yield f"s3://{BUCKET}"
