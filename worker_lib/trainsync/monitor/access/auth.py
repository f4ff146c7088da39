"""Authenticates: a ServiceAccount token, projected for this run, checked offline with the JWKS."""

import asyncio
import logging
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import jwt

from trainsync.api import names
from trainsync.kube.client import KubeError
from trainsync.monitor.errors import (
    ForbiddenError,
    NotReadyError,
    NotYetError,
    UnauthenticatedError,
)
from trainsync.monitor.kube.client import KubeApi
from trainsync.monitor.kube.run_reader import RunReader

_LOG = logging.getLogger(__name__)

# Asymmetric ones only: with "none" or HMAC a caller could sign for itself.
ALGORITHMS: Final = ["RS256", "RS384", "RS512", "ES256", "ES384", "ES512"]
_AUDIENCE = re.compile(rf"^{re.escape(names.GROUP)}/run/([^/]+)/(0|[1-9][0-9]*|servers)$")
_SERVERS: Final = "servers"
_SHORTEST_REFETCH: Final = 10.0
_LONGEST_TOKEN: Final = 16384
_FACTS_AGE: Final = 10.0
_LEEWAY_SECONDS: Final = 10


@dataclass(frozen=True)
class Caller:
    """A pod of this run; ``generation`` is the attempt that made its RayCluster."""

    generation: int
    pod: str


@dataclass(frozen=True)
class ServerCaller:
    """A pod of one of the run's inference servers: by the token, which is bound to the pod."""

    pod: str


@dataclass(frozen=True)
class _Token:
    """A valid token of this run; ``subject`` is a generation of RayClusters, or `_SERVERS`."""

    subject: str
    pod: str | None
    account: str


class KeySet:
    """The cluster's token keys, fetched when an unknown key is seen, at most every 10 s."""

    def __init__(self, api: KubeApi, clock: Callable[[], float] = time.monotonic) -> None:
        self._api = api
        self._clock = clock
        self._issuer = ""
        self._keys: dict[str, jwt.PyJWK] = {}
        self._fetched_at = float("-inf")
        self._lock = asyncio.Lock()

    async def find(self, key_id: str) -> tuple[str, jwt.PyJWK]:
        """Issuer and key.

        Raises:
            UnauthenticatedError: the cluster has no such key.
            NotReadyError: the keys cannot be had.
        """
        async with self._lock:
            if key_id not in self._keys and self._clock() - self._fetched_at >= _SHORTEST_REFETCH:
                await self._fetch()
            if not self._keys:
                raise NotReadyError("the cluster's token keys are not known yet")
            if key_id not in self._keys:
                raise UnauthenticatedError(f"the token is signed with unknown key {key_id[:64]!r}")
            return self._issuer, self._keys[key_id]

    async def _fetch(self) -> None:
        self._fetched_at = self._clock()
        try:
            issuer, document = await self._api.token_keys()
            keys = jwt.PyJWKSet.from_dict(document).keys
        except (KubeError, jwt.PyJWTError) as error:
            _LOG.warning("the cluster's token keys cannot be fetched: %s", error)
            return
        self._issuer = issuer
        self._keys = {key.key_id: key for key in keys if key.key_id is not None}


class Authenticator:
    """Checks bearer tokens of one run.

    A token passes when it is signed by the cluster, not expired, from the run's namespace, and its
    audience names this run and either the present RayClusters of one of its clusters or, for the
    routes of servers alone, the run's inference servers.
    """

    def __init__(self, keys: KeySet, reader: RunReader, *, run_uid: str, namespace: str) -> None:
        self._keys = keys
        self._reader = reader
        self._run_uid = run_uid
        self._namespace = namespace

    async def check(self, authorization: str | None) -> Caller:
        """The caller behind an ``Authorization`` header.

        Raises:
            UnauthenticatedError: no token, or not a valid one.
            ForbiddenError: a valid one, of another run, namespace or older RayCluster.
            NotYetError: of a RayCluster newer than the run's status tells.
            NotReadyError: it cannot be judged now.
        """
        token = await self._token(authorization)
        if token.subject == _SERVERS:
            raise ForbiddenError("the token is of an inference server, which may only report")
        await self._check_generation(generation := int(token.subject))
        return Caller(generation, token.pod or token.account)

    async def check_server(self, authorization: str | None) -> ServerCaller:
        """The inference server's pod behind an ``Authorization`` header.

        Raises:
            UnauthenticatedError: no token, or not a valid one.
            ForbiddenError: a valid one, not of an inference server of this run.
            NotReadyError: it cannot be judged now.
        """
        token = await self._token(authorization)
        if token.subject != _SERVERS:
            raise ForbiddenError("the token is not of an inference server, which alone may report")
        if token.pod is None:
            raise ForbiddenError("the token is not bound to a pod")
        return ServerCaller(token.pod)

    async def _token(self, authorization: str | None) -> _Token:
        claims = await self._decode(_bearer(authorization))
        subject = self._subject(claims)
        kubernetes = claims.get("kubernetes.io")
        bound = kubernetes if isinstance(kubernetes, Mapping) else {}
        if bound.get("namespace") != self._namespace:
            raise ForbiddenError(f"the token is not of namespace {self._namespace}")
        pod = bound.get("pod")
        name = pod.get("name") if isinstance(pod, Mapping) else None
        return _Token(subject, str(name) if name else None, str(claims.get("sub", "")))

    async def _decode(self, token: str) -> Mapping[str, Any]:
        try:
            key_id = jwt.get_unverified_header(token).get("kid")
        except jwt.PyJWTError as error:
            raise UnauthenticatedError(f"the token is malformed: {error}") from error
        if not isinstance(key_id, str):
            raise UnauthenticatedError("the token names no key")
        issuer, key = await self._keys.find(key_id)
        try:
            claims: Mapping[str, Any] = jwt.decode(
                token,
                key,
                algorithms=ALGORITHMS,
                issuer=issuer,
                leeway=_LEEWAY_SECONDS,
                # The audience is judged below, where the refusal can say what is wrong with it.
                options={"verify_aud": False, "require": ["exp", "iss", "aud"]},
            )
        except jwt.PyJWTError as error:
            raise UnauthenticatedError(f"the token is not valid: {error}") from error
        return claims

    def _subject(self, claims: Mapping[str, Any]) -> str:
        audience = claims["aud"]
        audiences = audience if isinstance(audience, list) else [audience]
        matches = [m for a in audiences if isinstance(a, str) and (m := _AUDIENCE.match(a))]
        if not matches:
            raise ForbiddenError("the token's audience is not a TrainingRun")
        for match in matches:
            if match[1] == self._run_uid:
                return match[2]
        raise ForbiddenError("the token is of another run")

    async def _check_generation(self, generation: int) -> None:
        known = (await self._reader.facts(_FACTS_AGE)).generations.values()
        if generation not in known:
            known = (await self._reader.facts(0.0)).generations.values()
        if generation in known:
            return
        if any(generation < present for present in known):
            raise ForbiddenError(
                f"the token is of the RayCluster of attempt {generation}, which is replaced"
            )
        raise NotYetError(f"no RayCluster of attempt {generation} is known yet")


def _bearer(authorization: str | None) -> str:
    scheme, _, token = (authorization or "").partition(" ")
    if scheme.lower() != "bearer" or not token.strip():
        raise UnauthenticatedError("a bearer token is needed: the one in TRAINSYNC_TOKEN_FILE")
    if len(token) > _LONGEST_TOKEN:
        raise UnauthenticatedError("the token is longer than any of Kubernetes")
    return token.strip()
