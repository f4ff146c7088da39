"""The monitor of a run whose checkpoints are in a store: the same ledger, with a store around it.

`core` answers requests and ticks, as `trainsync.monitor.core.core` does on a volume; `executor`
carries out the ledger's decisions with `verifier` and `retention`, `scan` takes what participants
put into the ledger, `term_hold` takes the run's term and knows when it is lost, `sweeps` says when
`tidy` removes what is over, and `origin` chooses what an attempt resumes from.
It has no account but in a pod. State dicts of steps that are trained again are superseded; readers
have no leases, so each one stays for as long as a reader may be at it. What decides who may commit
is in `trainsync.storage.objects.live`.
"""
