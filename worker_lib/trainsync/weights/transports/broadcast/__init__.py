"""The method `nccl`: the trainer sends each version to every explorer, or reports that it is lost.

Begin at `broadcaster` (trainer), `passes` (one broadcast), `transport_selector` (which way) and
`receiver` (explorer); `deadlines` has every limit of time, `link` is the control line and its
handshake.

The control line is a TCP connection. A frame is 4 bytes of length (big-endian) and a JSON object
with ``kind``::

    trainer   challenge {nonce}
    explorer  hello {name, started, seen_attempt, attempt, version, schema, port, group, nonce,
                     proof}
    trainer   welcome {attempt, proof}, or refused {cause}

The proof is HMAC-SHA256(token, JSON[role, trainer's nonce, explorer's nonce, frame without proof]).
Then come ``prepare``, ``receive``, ``laid``, ``flip``, ``answer`` and ``beat``: ``receive`` names
the way (``chain`` and ``next``; ``group``; ``segment``; ``base`` of a delta).
"""
