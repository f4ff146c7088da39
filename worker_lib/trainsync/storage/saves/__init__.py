"""One save on the run's volume, from receipts in staging to a manifest and the pointers.

Begin at `receipts` (what a rank leaves), `promote` (files move to their step), `manifest` (the
commit point) and `pointers`; `retention` and `superseding` say what may go, `rollback` what lies
aside. `trainsync.storage.records` reads and writes their JSON files, and has the messages of
damaged ones.
"""
