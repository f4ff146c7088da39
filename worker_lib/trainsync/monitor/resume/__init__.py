"""Which checkpoint a run goes on from, and which incarnation of a job may train.

Begin at `choice`; `claiming` grants an attempt once, `digest_reader` reads a save to the last bit,
`set_aside` puts a damaged checkpoint aside; `rollback` goes back to an older one on request.
"""
