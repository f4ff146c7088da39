"""An agent's settings: options, each of which a variable of the environment can give."""

import argparse
import logging
import os
import re
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path
from typing import Final, Literal, NoReturn, get_args
from urllib.parse import urlsplit

from trainsync.agent import checks
from trainsync.agent.checks import AgentSettingsError
from trainsync.api import env
from trainsync.api.spec import LogLevel, Sync
from trainsync.engines.servers.adapter import Adapter
from trainsync.engines.servers.base import PauseMode
from trainsync.engines.servers.kinds import PAUSES, EngineKind
from trainsync.engines.servers.sglang_routes.base import SGLangRoute
from trainsync.runtime.settings import misspelt
from trainsync.runtime.sync_store import SyncStore
from trainsync.storage.objects.address import is_url, parse
from trainsync.storage.objects.errors import StoreUrlError
from trainsync.weights.staging.reading import MEMORY_VARIABLE
from trainsync.weights.transports.shared_memory.segment import SHARED_MEMORY

DEFAULT_PORT: Final = 8090
DTYPES: Final = ("float32", "float16", "bfloat16")
_BLIND_SECONDS: Final = 60
_LAST_PORT: Final = 65535
_SERVERS: Final = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")

ProofPolicy = Literal["if-present", "required"]
"""Policy for a version without a proof: its server is ready, or the version is not loaded."""

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class Rendezvous:
    """The monitor that an agent reports to, and the names in its reports.

    Attributes:
        monitor: URL of the monitor.
        servers: the entry of spec.servers.
        endpoint: URL of the server for clients, told to the monitor.
    """

    monitor: str
    token_file: Path
    servers: str
    endpoint: str | None


@dataclass(frozen=True)
class AgentSettings:
    """See the options of `parser`; times in seconds, staleness in steps.

    Attributes:
        server: the server; of an agent that ``stages_only``, the agent that leads.
        directory: of the run; None: versions come from ``bucket`` or ``store``.
        bucket: URL of the run's bucket, whose commits are followed.
        store: of sync method store.
        name: of this agent, in its leases.
        rendezvous: None: without a monitor.
        fellows: whether versions are taken from other agents, and given to them.
        other_hosts: of the server's engine: URLs of their agents, in the order of their ranks.
        stages_only: whether this is the agent of another host of an engine.
        prepare_seconds: for a version to be prepared before the pause; 0: none is.
        adapter: of the server, which versions are of; None: they are of the whole model.
        driver: of an engine ``custom``, as ``package.module:function``.
        sglang_route: of an engine ``sglang``, by which versions come to the server.
    """

    server: str
    engine: EngineKind
    directory: Path | None
    run_uid: str | None
    max_staleness: int
    serve_before_first: bool
    blind_seconds: int
    pause: PauseMode
    timeout: int
    proof: ProofPolicy
    dtype: str | None
    memory: Path
    host: str
    port: int
    log_level: LogLevel
    name: str
    rendezvous: Rendezvous | None = None
    fellows: bool = False
    store: SyncStore | None = None
    bucket: str | None = None
    other_hosts: tuple[str, ...] = ()
    stages_only: bool = False
    prepare_seconds: int = 0
    adapter: Adapter | None = None
    driver: str | None = None
    sglang_route: SGLangRoute = "disk"

    @property
    def place(self) -> str:
        """The source of versions, for people."""
        return self.store.url if self.store is not None else self.bucket or str(self.directory)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise AgentSettingsError(message)


def parser(
    environ: Mapping[str, str] = os.environ,
    kind: type[argparse.ArgumentParser] = argparse.ArgumentParser,
) -> argparse.ArgumentParser:
    """The options.

    Args:
        environ: where options that are not given come from.
    """

    def add(option: str, variables: Sequence[str], default: object, text: str) -> None:
        given = next((environ[name] for name in variables if environ.get(name)), default)
        names = ", else ".join(variables)
        shown = "" if default is None else f" (default: {default})"
        made.add_argument(
            option, default=given, help=f"{text}{shown}" + (f"; or {names}" if names else "")
        )

    made = kind(
        prog="trainsync.agent",
        description="Makes one inference server follow a run's committed weights.",
    )
    add("--server", [env.AGENT_SERVER], None, "the server, such as http://127.0.0.1:8000")
    made.add_argument(
        "--other-hosts",
        default=environ.get(env.AGENT_OTHER_HOSTS) or "",
        help="of vLLM's engine on several hosts: URLs of the agents on those with --node-rank 1, "
        f"2 and so on, with commas between them; or {env.AGENT_OTHER_HOSTS}",
    )
    add(
        "--leader",
        [env.AGENT_LEADER],
        None,
        "on such a host, in place of --server: the agent "
        "beside the server, such as http://10.0.0.1:8090; only where versions come from, --dtype, "
        "--timeout, --memory, --host and --port count then",
    )
    add("--engine", [env.AGENT_ENGINE], "vllm", f"{', '.join(get_args(EngineKind))}: of the server")
    add("--driver", [env.AGENT_DRIVER], None, "of a custom engine: package.module:function")
    add(
        "--sglang-route",
        [env.AGENT_SGLANG_ROUTE],
        "disk",
        f"{', '.join(get_args(SGLangRoute))}: of SGLang, whether versions come as files in "
        "--memory, as tensors in /dev/shm, or by broadcasts in a process group",
    )
    made.add_argument(
        "--directory",
        help="the run's directory, of sync method checkpoint, or the URL of its bucket, with "
        f"credentials as trainers have them, to read alone; or {env.CHECKPOINT_DIR}",
    )
    made.add_argument(
        "--store",
        help="in place of a directory: the store of sync method store, such as s3://bucket/prefix, "
        f"with credentials as trainers have them, to read alone; or {env.SYNC_STORE_URL}",
    )
    add("--store-endpoint", [env.SYNC_STORE_ENDPOINT], None, "of a store that is not the cloud's")
    add("--store-region", [env.SYNC_STORE_REGION], None, "of S3")
    made.add_argument(
        "--store-allow-http",
        action="store_const",
        const="true",
        default=environ.get(env.SYNC_STORE_ALLOW_HTTP) or "false",
        help="the endpoint may be http://, where others can read and change what goes by; or "
        f"{env.SYNC_STORE_ALLOW_HTTP}=true",
    )
    add(
        "--run-uid",
        [env.RUN_UID],
        None,
        "of the run; default: the one that claimed the directory or store last",
    )
    add(
        "--max-staleness",
        [env.SYNC_MAX_STALENESS, env.SYNC_INTERVAL],
        Sync().interval,
        "steps that a ready server may be behind the newest committed version; with less than "
        "there are between two versions no server is ready while it takes one",
    )
    made.add_argument(
        "--serve-before-first-version",
        action="store_const",
        const="true",
        default=environ.get(env.AGENT_SERVE_BEFORE_FIRST_VERSION) or "false",
        help="be ready with the weights that the server has until a version is committed; or "
        f"{env.AGENT_SERVE_BEFORE_FIRST_VERSION}=true",
    )
    add(
        "--blind-seconds",
        [env.AGENT_BLIND_SECONDS],
        _BLIND_SECONDS,
        "how long a server stays ready while the directory or store cannot be read",
    )
    add("--pause", [env.AGENT_PAUSE], "keep", f"{', '.join(get_args(PauseMode))}: running requests")
    add(
        "--prepare-seconds",
        [env.AGENT_PREPARE_SECONDS],
        0,
        "let vLLM on a CPU load each version beside the one that it serves, where its memory has "
        "room for a second copy of the weights, so that an update pauses it only to replace them; "
        "after so many seconds the pause does without; 0: never",
    )
    add(
        "--timeout",
        [env.SYNC_TIMEOUT_SECONDS],
        Sync().timeout_seconds,
        "seconds for the fetch of a version, its update and its proof, each",
    )
    add(
        "--proof",
        [env.AGENT_PROOF],
        "if-present",
        f"{', '.join(get_args(ProofPolicy))}: versions without a proof are taken, or refused",
    )
    add(
        "--adapter",
        [env.AGENT_ADAPTER],
        None,
        "of vLLM with --enable-lora: name of the LoRA adapter that follows the run, whose versions "
        "were saved with lora='adapter'; the base model stays as it is",
    )
    add(
        "--adapter-config",
        [env.AGENT_ADAPTER_CONFIG],
        None,
        "the adapter's adapter_config.json, as PEFT saves it: the file, or its content",
    )
    add("--dtype", [env.AGENT_DTYPE], None, f"convert weights to {', '.join(DTYPES)}")
    add("--memory", [MEMORY_VARIABLE], SHARED_MEMORY, "shared memory that the server sees, too")
    add("--host", [env.AGENT_HOST], "127.0.0.1", "address of /readyz and /metrics")
    add("--port", [env.AGENT_PORT], DEFAULT_PORT, "port of /readyz and /metrics, 0: a free one")
    # The pods of Ray clusters have these variables, too, whose token is not of a server.
    ours = bool(environ.get(env.SERVERS))
    where, token = ([env.MONITOR_URL], [env.TOKEN_FILE]) if ours else ([], [])
    add("--monitor", where, None, "the run's monitor, which tells of new versions")
    add("--token-file", token, None, "with the token for the monitor")
    add("--servers", [env.SERVERS], None, "name of the entry of spec.servers")
    add(
        "--endpoint",
        [env.AGENT_ENDPOINT],
        None,
        "URL of the server, for clients; else its port at --host, if that is no loopback address",
    )
    made.add_argument(
        "--fellows",
        action="store_const",
        const="true",
        default=environ.get(env.AGENT_FELLOWS) or "false",
        help="take versions from other agents of the run, and pass them on, which needs --monitor, "
        "an address of this host as --host, and room for one more version in --memory; or "
        f"{env.AGENT_FELLOWS}=true",
    )
    add("--log-level", [env.LOG_LEVEL], LogLevel.INFO, ", ".join(LogLevel))
    return made


def read_settings(
    arguments: Sequence[str], environ: Mapping[str, str] = os.environ
) -> AgentSettings:
    """Read the settings from the command line and the environment.

    Raises:
        SettingsError: something is missing or wrong.
    """
    wrong = list(misspelt(environ))
    if wrong and env.MONITOR_URL not in environ:  # a newer operator may set more than is known here
        raise AgentSettingsError("; ".join(wrong))
    given = parser(environ, _Parser).parse_args(arguments)
    server = _served(given)
    directory, bucket, store = _place(given, environ)
    memory = Path(given.memory).absolute()
    if not memory.is_dir():
        raise AgentSettingsError(f"--memory is {memory}, which is no directory")
    engine: EngineKind = checks.choice("--engine", given.engine, get_args(EngineKind))
    return AgentSettings(
        server=server,
        engine=engine,
        directory=directory,
        run_uid=given.run_uid or None,
        max_staleness=checks.number("--max-staleness", given.max_staleness, 0),
        serve_before_first=checks.choice(
            env.AGENT_SERVE_BEFORE_FIRST_VERSION,
            given.serve_before_first_version,
            ("true", "false"),
        )
        == "true",
        blind_seconds=checks.number("--blind-seconds", given.blind_seconds, 1),
        pause=checks.choice("--pause", given.pause, PAUSES[engine]),
        timeout=checks.number("--timeout", given.timeout, 1),
        proof=checks.choice("--proof", given.proof, get_args(ProofPolicy)),
        dtype=None if given.dtype is None else checks.choice("--dtype", given.dtype, DTYPES),
        memory=memory,
        host=checks.address(given.host),
        port=checks.number("--port", given.port, 0, _LAST_PORT),
        log_level=LogLevel(checks.choice("--log-level", given.log_level, [*LogLevel])),
        name=f"agent-{environ.get(env.POD_NAME) or socket.gethostname()}",
        rendezvous=_rendezvous(given),
        fellows=_fellows(given),
        store=store,
        bucket=bucket,
        other_hosts=_other_hosts(given),
        stages_only=bool(given.leader),
        prepare_seconds=_prepare_seconds(given),
        driver=checks.driver(given.driver, custom=engine == "custom"),
        sglang_route=_sglang_route(given),
        adapter=checks.adapter(given.adapter, given.adapter_config, _beside_adapter(given)),
    )


def _served(given: argparse.Namespace) -> str:
    """URL of the server, or of the agent that leads."""
    if given.leader and given.server:
        raise AgentSettingsError(
            "--server and --leader are both given: the agent that leads has the server"
        )
    if given.leader:
        if given.monitor or given.fellows == "true":
            raise AgentSettingsError(
                "--monitor and --fellows are of the agent that leads, not beside --leader"
            )
        return checks.url("--leader", given.leader)
    if not given.server:
        raise AgentSettingsError(f"--server (or {env.AGENT_SERVER}) is not given")
    return checks.url("--server", given.server)


def _other_hosts(given: argparse.Namespace) -> tuple[str, ...]:
    if not given.other_hosts:
        return ()
    if given.leader:
        raise AgentSettingsError("--other-hosts is of the agent that leads, not beside --leader")
    if given.engine != "vllm":
        raise AgentSettingsError(
            f"--other-hosts is given, expected --engine vllm: {given.engine} on several hosts is "
            "not supported"
        )
    urls = [checks.url("--other-hosts", url) for url in given.other_hosts.split(",")]
    if twice := [url for url in urls if urls.count(url) > 1]:
        raise AgentSettingsError(f"--other-hosts names {twice[0]} twice: each host has its agent")
    return tuple(urls)


def _prepare_seconds(given: argparse.Namespace) -> int:
    seconds = checks.number("--prepare-seconds", given.prepare_seconds, 0)
    if seconds and given.leader:
        raise AgentSettingsError(
            "--prepare-seconds is of the agent that leads, not beside --leader"
        )
    if seconds and given.engine != "vllm":
        raise AgentSettingsError(
            f"--prepare-seconds is {seconds}, expected --engine vllm: {given.engine} prepares none"
        )
    return seconds


def _sglang_route(given: argparse.Namespace) -> SGLangRoute:
    route: SGLangRoute = checks.choice("--sglang-route", given.sglang_route, get_args(SGLangRoute))
    if route != "disk" and given.engine != "sglang":
        raise AgentSettingsError(
            f"--sglang-route is {route}, expected --engine sglang: {given.engine} has no such route"
        )
    return route


def _beside_adapter(given: argparse.Namespace) -> list[str]:
    """Options that are given, and not supported beside --adapter."""
    options = {
        f"--engine {given.engine}": given.engine != "vllm",
        "--leader": given.leader,
        "--other-hosts": given.other_hosts,
        "--prepare-seconds": int(given.prepare_seconds),
    }
    return [option for option, is_given in options.items() if is_given]


def _place(
    given: argparse.Namespace, environ: Mapping[str, str]
) -> tuple[Path | None, str | None, SyncStore | None]:
    """The directory, the bucket, or the store; an option counts before the environment."""
    directory, store = given.directory, given.store
    names = "--directory", "--store"
    if not directory and not store:
        names = env.CHECKPOINT_DIR, env.SYNC_STORE_URL
        directory, store = (environ.get(name) for name in names)
    if directory and store:
        raise AgentSettingsError(
            f"{names[0]} and {names[1]} are both given: versions come from one of the two, which"
            " --directory or --store names"
        )
    if store:
        return None, None, _store(names[1], store, given)
    if not directory:
        raise AgentSettingsError(
            f"--directory (or {env.CHECKPOINT_DIR}), or --store (or {env.SYNC_STORE_URL}), is not"
            " given"
        )
    if is_url(directory):
        return None, _parsed(names[0], directory), None
    path = Path(directory).absolute()
    if path.exists() and not path.is_dir():
        raise AgentSettingsError(f"{names[0]} is {path}, which is no directory")
    return path, None, None


def _parsed(name: str, url: str) -> str:
    try:
        return str(parse(url))
    except StoreUrlError as error:
        raise AgentSettingsError(f"{name}: {error}") from error


def _store(name: str, url: str, given: argparse.Namespace) -> SyncStore:
    place = _parsed(name, url)
    allow_http = checks.choice(env.SYNC_STORE_ALLOW_HTTP, given.store_allow_http, ("true", "false"))
    return SyncStore(
        place, given.store_endpoint or None, given.store_region or None, allow_http == "true"
    )


def _rendezvous(given: argparse.Namespace) -> Rendezvous | None:
    options = {
        f"--{name}": getattr(given, name.replace("-", "_"))
        for name in ("monitor", "token-file", "servers")
    }
    missing = [option for option, value in options.items() if not value]
    if len(missing) == len(options) and not given.endpoint:
        return None
    if missing:
        raise AgentSettingsError(
            f"{' and '.join(missing)} not given: a monitor needs {', '.join(options)} together"
        )
    if not _SERVERS.fullmatch(given.servers):
        raise AgentSettingsError(
            f"--servers is {given.servers!r}, expected a name such as rollouts"
        )
    return Rendezvous(
        monitor=checks.url("--monitor", given.monitor),
        token_file=Path(given.token_file),
        servers=given.servers,
        endpoint=checks.url("--endpoint", given.endpoint) if given.endpoint else _endpoint(given),
    )


def _fellows(given: argparse.Namespace) -> bool:
    if checks.choice(env.AGENT_FELLOWS, given.fellows, ("true", "false")) == "false":
        return False
    if not given.monitor:
        raise AgentSettingsError("--fellows needs --monitor, which tells agents of one another")
    if ip_address(checks.address(given.host)).is_unspecified:
        raise AgentSettingsError(
            f"--host is {given.host}, expected an address at which fellows reach this agent"
        )
    if ip_address(checks.address(given.host)).is_loopback:
        _LOG.warning(
            "--host is %s: agents on other hosts cannot reach this agent, which takes versions from"
            " them and gives none",
            given.host,
        )
    return True


def _endpoint(given: argparse.Namespace) -> str | None:
    """The server's URL for clients, as far as the agent's own address tells."""
    host, server = (
        ip_address(checks.address(given.host)),
        urlsplit(checks.url("--server", given.server)),
    )
    if host.is_loopback or host.is_unspecified:
        return None
    shown = f"[{host}]" if host.version == 6 else str(host)
    port = "" if server.port is None else f":{server.port}"
    return f"{server.scheme}://{shown}{port}"
