"""kubectl, the only client of the demo and the e2e tests, so that users can repeat every call."""

from __future__ import annotations

import codecs
import json
import os
import selectors
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from demo.errors import DemoError, KubectlError

Object = dict[str, Any]
T = TypeVar("T")
_POLL_SECONDS = 0.5
_RESTART_SECONDS = 0.5


@dataclass(frozen=True)
class Kubectl:
    """kubectl for one cluster. Every call has a deadline; failures raise KubectlError."""

    program: Path
    kubeconfig: Path

    def run(self, *words: str, timeout: float = 30, stdin: str | None = None) -> str:
        """Run kubectl and return its stdout."""
        argv = self._argv(*words)
        shown = "kubectl " + " ".join(words[:7])
        try:
            done = subprocess.run(
                argv,
                input=stdin,
                stdin=subprocess.DEVNULL if stdin is None else None,
                capture_output=True,
                text=True,
                timeout=timeout,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            raise KubectlError(f"`{shown}` did not end within {timeout:.0f} s") from error
        if done.returncode != 0:
            end = (done.stderr + done.stdout).strip()[-2000:]
            raise KubectlError(f"`{shown}` failed with exit code {done.returncode}: {end}")
        return done.stdout

    def get(self, kind: str, name: str, namespace: str) -> Object | None:
        """One object, or None when it does not exist."""
        text = self.run("-n", namespace, "get", kind, name, "-o", "json", "--ignore-not-found")
        return json.loads(text) if text.strip() else None

    def objects(self, kind: str, namespace: str, selector: str = "") -> list[Object]:
        """Objects of a kind, by label selector."""
        words = ("-n", namespace, "get", kind, "-o", "json", "-l", selector)
        items: list[Object] = json.loads(self.run(*words))["items"]
        return items

    def apply(self, *objects: Object, namespace: str) -> None:
        """Apply objects, server-side."""
        document = json.dumps({"apiVersion": "v1", "kind": "List", "items": list(objects)})
        # Without force, a second apply with another kubectl version would conflict with the first.
        words = ("apply", "--server-side", "--force-conflicts", "-f", "-")
        self.run("-n", namespace, *words, stdin=document)

    def delete(self, kind: str, name: str, namespace: str, timeout: float = 120) -> None:
        """Delete an object and wait until the object and its dependents are gone."""
        words = ("delete", kind, name, "--ignore-not-found", "--cascade=foreground")
        self.run("-n", namespace, *words, f"--timeout={timeout:.0f}s", timeout=timeout + 10)

    def exec(
        self, pod: str, namespace: str, *command: str, timeout: float = 60, container: str = ""
    ) -> str:
        """Run a command in a pod and return its stdout."""
        words = ["-n", namespace, "exec", pod, *(("-c", container) if container else ())]
        return self.run(*words, "--", *command, timeout=timeout)

    def watch(self, kind: str, name: str, namespace: str, seconds: float) -> Iterator[Object]:
        """The object now and after every change, until it is deleted.

        Restarts a watch that the server ends. Raises KubectlError after ``seconds``.
        """
        deadline = time.monotonic() + seconds
        words = ("-n", namespace, "get", kind, name, "-o", "json", "--watch")
        while True:
            with _Stream(self._argv(*words, "--output-watch-events=true")) as stream:
                for event in stream.documents(deadline):
                    if event["type"] == "DELETED":
                        return
                    yield event["object"]
            if time.monotonic() >= deadline:
                raise KubectlError(f"{kind} {namespace}/{name} did not end within {seconds:.0f} s")
            if self.get(kind, name, namespace) is None:
                return
            time.sleep(_RESTART_SECONDS)

    def _argv(self, *words: str) -> list[str]:
        return [str(self.program), f"--kubeconfig={self.kubeconfig}", *words]


class _Stream:
    """A running program whose output is a sequence of JSON documents."""

    def __init__(self, argv: list[str]) -> None:
        self._argv = argv

    def __enter__(self) -> _Stream:
        self._process = subprocess.Popen(
            self._argv, stdout=subprocess.PIPE, stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()

    def documents(self, deadline: float) -> Iterator[Object]:
        """Documents until the program ends or ``deadline`` (monotonic) is over."""
        pipe = self._process.stdout
        if pipe is None:
            return
        decoder = json.JSONDecoder()
        # A read may end inside a multi-byte character.
        characters = codecs.getincrementaldecoder("utf-8")()
        text = ""
        with selectors.DefaultSelector() as selector:
            selector.register(pipe, selectors.EVENT_READ)
            while selector.select(max(deadline - time.monotonic(), 0)):
                chunk = os.read(pipe.fileno(), 1 << 16)
                if not chunk:
                    return
                text += characters.decode(chunk)
                while text := text.lstrip():
                    try:
                        document, end = decoder.raw_decode(text)
                    except json.JSONDecodeError:
                        break
                    yield document
                    text = text[end:]


def wait_for(look: Callable[[], T | None], *, what: str, seconds: float) -> T:
    """Call ``look`` until it returns a true value, and return the value.

    Raises DemoError when ``seconds`` are over.
    """
    deadline = time.monotonic() + seconds
    while True:
        found = look()
        if found:
            return found
        if time.monotonic() >= deadline:
            raise DemoError(f"waited {seconds:.0f} s in vain for {what}")
        time.sleep(_POLL_SECONDS)
