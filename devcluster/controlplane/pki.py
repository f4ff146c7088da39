"""Keys and certificates of a cluster, made with openssl, and the kubeconfig files."""

from __future__ import annotations

import base64
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from devcluster.paths import Cluster, Node
from devcluster.shell import run, write_atomically

_DAYS = "3650"


@dataclass(frozen=True)
class Identity:
    """A certificate to make: its subject and its uses."""

    file: str
    common_name: str
    organization: str = ""
    names: Sequence[str] = ()
    """subjectAltName entries, such as ``DNS:localhost``; with them also a server's certificate."""
    authority: str = "ca"


def control_plane_identities(cluster: Cluster) -> list[Identity]:
    return [
        Identity(
            "apiserver",
            "kube-apiserver",
            names=[
                "DNS:localhost",
                "DNS:kubernetes",
                "DNS:kubernetes.default",
                "DNS:kubernetes.default.svc",
                "DNS:kubernetes.default.svc.cluster.local",
                "IP:127.0.0.1",
                f"IP:{cluster.address}",
                f"IP:{cluster.kubernetes_service}",
            ],
        ),
        Identity("admin", "devcluster-admin", "system:masters"),
        Identity("apiserver-kubelet-client", "kube-apiserver-kubelet-client", "system:masters"),
        Identity("controller-manager", "system:kube-controller-manager"),
        Identity("scheduler", "system:kube-scheduler"),
        Identity("kube-proxy", "system:kube-proxy"),
        Identity("front-proxy-client", "front-proxy-client", authority="front-proxy-ca"),
    ]


def node_identity(node: Node) -> Identity:
    return Identity(
        node.name,
        f"system:node:{node.name}",
        "system:nodes",
        names=[f"DNS:{node.name}", f"IP:{node.address}"],
    )


def ensure_control_plane_pki(cluster: Cluster) -> None:
    """Make both authorities, and every certificate and kubeconfig that is missing."""
    cluster.pki.mkdir(parents=True, exist_ok=True)
    cluster.pki.chmod(0o700)
    for authority in ("ca", "front-proxy-ca"):
        _ensure_authority(cluster.pki, authority)
    key = cluster.pki / "service-accounts.key"
    if not key.exists():
        run(
            [
                "openssl",
                "genpkey",
                "-algorithm",
                "RSA",
                "-pkeyopt",
                "rsa_keygen_bits:2048",
                "-out",
                key,
            ]
        )
        run(["openssl", "pkey", "-in", key, "-pubout", "-out", key.with_suffix(".pub")])
    for identity in control_plane_identities(cluster):
        _ensure_certificate(cluster.pki, identity)
    for name in ("controller-manager", "scheduler", "kube-proxy"):
        write_kubeconfig(cluster, name, cluster.pki / f"{name}.kubeconfig")
    write_kubeconfig(cluster, "admin", cluster.kubeconfig)


def ensure_node_pki(node: Node) -> None:
    """Make a node's certificate (client and server at once) and its kubeconfig."""
    ensure_client(node.cluster, node_identity(node), node.directory / "kubelet.kubeconfig")


def ensure_client(cluster: Cluster, identity: Identity, kubeconfig: Path) -> None:
    """Make a client's certificate and its kubeconfig."""
    _ensure_certificate(cluster.pki, identity)
    write_kubeconfig(cluster, identity.file, kubeconfig)


def write_kubeconfig(cluster: Cluster, identity: str, path: Path) -> None:
    """A kubeconfig with embedded certificates, so that the file can be copied."""

    def data(name: str) -> str:
        return base64.b64encode((cluster.pki / name).read_bytes()).decode()

    context = f"devcluster-{cluster.name}"
    document = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": context,
        "clusters": [
            {
                "name": context,
                "cluster": {"server": cluster.server, "certificate-authority-data": data("ca.crt")},
            }
        ],
        "users": [
            {
                "name": identity,
                "user": {
                    "client-certificate-data": data(f"{identity}.crt"),
                    "client-key-data": data(f"{identity}.key"),
                },
            }
        ],
        "contexts": [{"name": context, "context": {"cluster": context, "user": identity}}],
    }
    write_atomically(path, json.dumps(document, indent=2) + "\n", mode=0o600)


def _ensure_authority(pki: Path, name: str) -> None:
    certificate = pki / f"{name}.crt"
    if certificate.exists():
        return
    temporary = certificate.with_suffix(".tmp")
    run(
        ["openssl", "req", "-x509", "-new", "-nodes", "-newkey", "ec", "-pkeyopt",
         "ec_paramgen_curve:P-256", "-keyout", pki / f"{name}.key", "-out", temporary,
         "-days", _DAYS, "-subj", f"/CN=devcluster-{name}",
         "-addext", "keyUsage=critical,keyCertSign,cRLSign,digitalSignature"]
    )  # fmt: skip
    temporary.rename(certificate)


def _ensure_certificate(pki: Path, identity: Identity) -> None:
    certificate = pki / f"{identity.file}.crt"
    if certificate.exists():
        return
    usages = "clientAuth,serverAuth" if identity.names else "clientAuth"
    extensions = f"keyUsage=critical,digitalSignature\nextendedKeyUsage={usages}\n"
    if identity.names:
        extensions += f"subjectAltName={','.join(identity.names)}\n"
    extension_file = pki / f"{identity.file}.ext"
    write_atomically(extension_file, extensions)
    organization = f"/O={identity.organization}" if identity.organization else ""
    request = pki / f"{identity.file}.csr"
    run(
        ["openssl", "req", "-new", "-nodes", "-newkey", "ec", "-pkeyopt",
         "ec_paramgen_curve:P-256", "-keyout", pki / f"{identity.file}.key", "-out", request,
         "-subj", f"{organization}/CN={identity.common_name}"]
    )  # fmt: skip
    temporary = certificate.with_suffix(".tmp")
    authority = pki / identity.authority
    run(
        ["openssl", "x509", "-req", "-in", request, "-CA", f"{authority}.crt",
         "-CAkey", f"{authority}.key", "-CAcreateserial", "-days", _DAYS,
         "-extfile", extension_file, "-out", temporary]
    )  # fmt: skip
    temporary.rename(certificate)
    request.unlink()
    extension_file.unlink()
