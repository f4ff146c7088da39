"""The command line: ``python3 -m devcluster COMMAND``."""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from devcluster import lifecycle
from devcluster.errors import DevclusterError
from devcluster.health import examine
from devcluster.hosts.processes import find_init
from devcluster.images.imageload import load_images
from devcluster.kueue import start_kueue
from devcluster.kwok import fake_nodes
from devcluster.lws import start_lws
from devcluster.monitoring import start_monitoring
from devcluster.paths import MAX_NODES
from devcluster.policies import start_policies
from devcluster.registry import check_name
from devcluster.shell import Progress
from devcluster.tools import ensure_tools


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; 0 if it succeeded, 1 after an error, printed as one sentence."""
    arguments = _parser().parse_args(argv)
    try:
        if arguments.run is not _tools:
            _require_root_on_linux()
        check_name(arguments.name)
        return int(arguments.run(arguments, Progress()))
    except DevclusterError as error:
        print(f"devcluster: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("devcluster: interrupted; `up` goes on from here, `down` removes", file=sys.stderr)
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="devcluster",
        description="A real Kubernetes on this machine, in namespaces of its own (root, Linux).",
    )
    parser.add_argument("--name", default="dev", help="which cluster (default: dev)")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    command = commands.add_parser("up", help="make the cluster, or repair it; no-op when healthy")
    command.add_argument("--nodes", type=int, help="how many nodes (default: $NODES, or 1)")
    command.set_defaults(run=_up)
    command = commands.add_parser("down", help="end the cluster and leave nothing of it")
    command.set_defaults(run=_down)
    command = commands.add_parser("status", help="show the parts; exit code 1 unless all is well")
    command.set_defaults(run=_status)
    command = commands.add_parser("load-image", help="import image archives into every node")
    command.add_argument("tar", nargs="+", type=Path)
    command.set_defaults(run=_load_image)
    command = commands.add_parser("kubeconfig", help="print the path of the kubeconfig file")
    command.set_defaults(run=_kubeconfig)
    command = commands.add_parser("node-kill", help="lose a node at once")
    command.add_argument("node")
    command.set_defaults(run=_node_kill)
    command = commands.add_parser("node-cut", help="cut a node's network for some seconds")
    command.add_argument("node")
    command.add_argument("seconds", type=float)
    command.set_defaults(run=_node_cut)
    command = commands.add_parser("node-start", help="bring back a node that was killed")
    command.add_argument("node")
    command.set_defaults(run=_node_start)
    command = commands.add_parser(
        "monitoring", help="add a Prometheus with its operator (the first time ~13 min of builds)"
    )
    command.set_defaults(run=_monitoring)
    command = commands.add_parser("kueue", help="add Kueue (the first time ~3 min of builds)")
    command.set_defaults(run=_kueue)
    command = commands.add_parser("lws", help="add LWS (the first time ~2 min of build)")
    command.set_defaults(run=_lws)
    command = commands.add_parser(
        "policies", help="enforce NetworkPolicies (the first time ~3 min of build)"
    )
    command.set_defaults(run=_policies)
    command = commands.add_parser(
        "kwok", help="add fake nodes for many pods, until Ctrl-C (the first time ~1 min of build)"
    )
    command.add_argument("count", type=int, help="how many, each for 2,000 pods")
    command.set_defaults(run=_kwok)
    command = commands.add_parser(
        "tools", help="build the programs if needed; print their directory (kubectl, helm, ...)"
    )
    command.set_defaults(run=_tools)
    return parser


def _up(arguments: argparse.Namespace, progress: Progress) -> int:
    cluster = lifecycle.up(arguments.name, _wanted_nodes(arguments.nodes), progress)
    progress.say(f"export KUBECONFIG={cluster.kubeconfig}")
    return 0


def _wanted_nodes(option: int | None) -> int | None:
    """The value of the option or of $NODES; None if neither is set."""
    text = str(option) if option is not None else os.environ.get("NODES", "")
    if not text:
        return None
    if not text.isdigit() or not 1 <= int(text) <= MAX_NODES:
        raise DevclusterError(f"NODES is {text!r}, expected a number from 1 to {MAX_NODES}")
    return int(text)


def _down(arguments: argparse.Namespace, progress: Progress) -> int:
    lifecycle.down(arguments.name, progress)
    return 0


def _status(arguments: argparse.Namespace, progress: Progress) -> int:
    record = lifecycle.require_record(arguments.name)
    cluster = record.cluster
    health = examine(record)
    rows = [*health.control_plane.items(), *health.nodes.items(), *health.addons.items()]
    if not health.alive:
        rows.append(("namespaces", "gone"))
    for part, state in rows:
        print(f"{part:<26}{state}")
    print(f"{'kubeconfig':<26}{cluster.kubeconfig}")
    print(f"{'logs':<26}{cluster.logs}")
    return 1 if health.faults else 0


def _load_image(arguments: argparse.Namespace, progress: Progress) -> int:
    record = lifecycle.require_record(arguments.name)
    nodes = [record.cluster.node(number) for number in range(1, record.nodes + 1)]
    alive = [node for node in nodes if find_init(node.spec) is not None]
    if not alive:
        raise DevclusterError(f"no node of cluster {arguments.name!r} is running: run `up` first")
    load_images(alive, arguments.tar, progress)
    return 0


def _kubeconfig(arguments: argparse.Namespace, progress: Progress) -> int:
    print(lifecycle.require_record(arguments.name).cluster.kubeconfig)
    return 0


def _node_kill(arguments: argparse.Namespace, progress: Progress) -> int:
    lifecycle.kill_node(arguments.name, arguments.node, progress)
    return 0


def _node_cut(arguments: argparse.Namespace, progress: Progress) -> int:
    lifecycle.cut_node(arguments.name, arguments.node, arguments.seconds, progress)
    return 0


def _node_start(arguments: argparse.Namespace, progress: Progress) -> int:
    lifecycle.start_node(arguments.name, arguments.node, progress)
    return 0


def _monitoring(arguments: argparse.Namespace, progress: Progress) -> int:
    start_monitoring(lifecycle.require_record(arguments.name), progress)
    return 0


def _kwok(arguments: argparse.Namespace, progress: Progress) -> int:
    cluster = lifecycle.require_record(arguments.name).cluster
    with fake_nodes(cluster, arguments.count, progress), contextlib.suppress(KeyboardInterrupt):
        signal.pause()
    return 0


def _kueue(arguments: argparse.Namespace, progress: Progress) -> int:
    start_kueue(lifecycle.require_record(arguments.name), progress)
    return 0


def _lws(arguments: argparse.Namespace, progress: Progress) -> int:
    start_lws(lifecycle.require_record(arguments.name), progress)
    return 0


def _policies(arguments: argparse.Namespace, progress: Progress) -> int:
    start_policies(arguments.name, progress)
    return 0


def _tools(arguments: argparse.Namespace, progress: Progress) -> int:
    print(ensure_tools(progress).directory)
    return 0


def _require_root_on_linux() -> None:
    if sys.platform != "linux" or os.geteuid() != 0:
        raise DevclusterError("devcluster needs root on Linux: it makes namespaces and mounts")
