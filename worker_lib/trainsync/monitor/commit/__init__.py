"""What the monitor does to the disk: verify, commit, abort, clean up.

Begin at `core` (every request enters there, those about saves through `save_requests`) and
`executor` (carries out the ledger's decisions); `committer` has the order of renames, fsyncs,
manifest and pointer.
"""
