"""Makes the children that a plan asks for, and puts right those that differ.

Begin at `carry_out`; `child` applies one child by server-side apply, `stored_notation` knows what
the API server writes in its own words, `monitor_rollouts` how many monitors are replaced at a time.
`dry_run` tries an edit before the attempt ends for it, `rejected_requests` remembers what was
refused.
"""
