"""The operator's client of the Kubernetes API.

Begin at `client`; `kinds` names the kinds of objects, `objects` reads them as plain data;
`store` keeps what the watches have seen.
"""
