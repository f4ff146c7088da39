"""The run's inference servers, as their agents report them, and which version they are told of.

Begin at `roster`; `server.serving_routes` are the requests. Training never waits for anything here.
"""
