"""The method `nccl`: the trainer sends each version to every explorer, or reports that it is lost.

Begin at `broadcaster` (trainer), `passes` (one broadcast), `transport_selector` (which way) and
`receiver` (explorer); `deadlines` has every limit of time, `link` is the control line and its
handshake.
"""
