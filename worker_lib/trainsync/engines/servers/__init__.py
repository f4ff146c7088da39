"""Inference servers that are driven over HTTP: new weights between pause and resume.

Begin at `base` (what a driver does); `vllm` is the driver of a ``vllm serve``, `sglang` that of an
SGLang server, and `kinds` makes one of them. In place of an agent, on the server's host, as its
user::

    area = StagingArea()  # of trainsync.weights.staging.area: in /dev/shm; or StagingArea(folder)
    server = VLLMServer("http://127.0.0.1:8000")  # pause="keep"
    prover = ServerProver(server)  # of `proving`; one for each server process
    update = server.update(7, area.stage(7, state_dict))
    update.pause_seconds, server.version()  # how long nothing was generated; 7
    # of trainsync.weights.proof.record; None: the version was saved without a proof
    if (proof := read_proof(directory, manifest)) is not None:
        verdict = prover.prove(proof)  # Proven, or Refuted(reason, canary, off)

After `UpdateRefusedError` (the staged version is gone, torn or of another model) the server serves
the weights that it had. After `ServerPausedError`, or when the program died in an update, it is
paused until an update succeeds. For another folder than /dev/shm, set TRAINSYNC_STAGING_MEMORY for
the server.
"""
