"""A run's committed saves in object storage (S3, GCS, Azure): a store, named by its URL.

Nothing is renamed or linked there. Shards are written once, under keys that no other writer has;
the manifest names each one, and commits the save by one conditional put; the pointer follows by
another, and never goes back. Begin at `opening` (a URL becomes a `bucket`), `keys` (where
everything is) and `commits`; `inspecting` and `removal` show and remove what is there.
obstore does the requests, and is imported when the first store is opened.
"""
