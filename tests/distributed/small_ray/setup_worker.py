"""What a raylet starts for a worker, as Ray's own file of this name, which imports Ray for it: the
process becomes the worker, in the runtime environment that its arguments have.

The raylet looks for the file's name.
"""

import json
import os
import sys

CONTEXT = "--serialized-runtime-env-context="


def main() -> None:
    """Arguments: the worker's own, its language and the environment's context."""
    assert "--language=PYTHON" in sys.argv
    (context,) = [json.loads(word[len(CONTEXT) :]) for word in sys.argv if word.startswith(CONTEXT)]
    assert not context.get("override_worker_entrypoint"), "of a container"
    for name, value in (context.get("env_vars") or {}).items():
        os.environ[name] = os.path.expandvars(value)
    worker = [w for w in sys.argv[1:] if not w.startswith(("--language=", CONTEXT))]
    quoted = ("'" + word.replace("'", "'\"'\"'") + "'" for word in worker)
    python = context.get("py_executable") or sys.executable
    command = [*(context.get("command_prefix") or ()), "exec", python, *quoted]
    os.execvp("bash", ["bash", "-c", " ".join(command)])


main()
