"""How an update of a server ended, when it did not succeed."""

from typing import Final

from trainsync.engines.errors import EngineUpdateError
from trainsync.weights.errors import WeightsError

KEPT: Final = "the weights are as they were"
TORN: Final = "the weights are of two versions"
"""In the messages of an engine inside a server: they are all that comes back over HTTP."""


class ServerError(WeightsError):
    """A server did not answer in time, or not as it should."""


class UpdateRefusedError(ServerError):
    """The server did not take a version, and serves the weights that it had."""


class ServerPausedError(ServerError, EngineUpdateError):
    """The server is left paused, because its weights are not known to be of one version, or because
    it did not resume. Update it again, or replace it: nothing else makes it serve."""
