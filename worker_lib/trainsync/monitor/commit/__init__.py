"""The monitor's work on the disk: verify, commit, abort, clean up.

Begin at `executor` (carries out the ledger's decisions); `committer.commit` has the order of
renames, fsyncs and manifest, `Cleanup.clean_up` what follows: pointer, outcome, retention, staging,
trash.
"""
