"""The wire of a broadcast: the trainer, then one explorer after the other, each passing on at once.

Begin at `chain`; `sending` and `receiving` are its two ends, `bisection` finds the member that
keeps a chain from working.

A member joins the next one by the handshake of a control line (`broadcast.link`), with the token
HMAC-SHA256(token, "chain " + name). Then come the stream's bytes without frames, and 0x06 back.
"""
