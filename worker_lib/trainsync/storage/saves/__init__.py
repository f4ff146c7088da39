"""One save on the run's volume, from receipts in staging to a manifest and the pointers.

Begin at `receipts` (what a rank leaves), `promote` (files move to their step), `manifest` (the
commit point) and `pointers`; `retention` and `superseding` say what may go, `rollback` what lies
aside. Their JSON files are read and written by `trainsync.storage.records`.
"""
