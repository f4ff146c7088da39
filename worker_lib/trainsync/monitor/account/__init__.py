"""The account of a run: each GPU-second of its pods in one class.

Begin at `account`, which hears of pods, reports and saves; `role_time` divides the seconds of
one role and keeps their sum, `trainers` and `explorers` say into which classes. These are pure;
`recorder` gives them the time, and records the account on the volume.

What each class is, and where its number comes from:

- ``train``: the training loop, from one report to the next, except the time counted below. The
  process that calls ``ctx.report`` says when its loop began and how far its clock is.
- ``repeat``: the share of that time in steps that the run had reported before, in an attempt that
  was lost or rolled back. By counting steps.
- ``save``: the time that a checkpoint blocked its slowest rank, by the receipts of the ranks. They
  come later than the time that they speak of, so they are taken from the training that follows.
- ``sync``: one side waits for the other, or weights travel. Of trainers what ``pace.next_batches``
  took (receipts of state dicts where there is no pace); of explorers all but rollouts.
- ``generate``, ``stale``: rollouts that were trained on, and those that were not. The Synchronizer
  knows both; a rollout is told of once its fate is known.
- ``restart``: an attempt starts, the first too: from the last report of the one before (so with the
  step that was lost half-way) until its loop begins.
- ``queue``: pods that are made and wait for a node. Pods that a queue holds back are not made.
- ``idle``: time that no report covers: after the last step, and pods of which nothing reports.

All reports are cumulative, so one that is lost, late or doubled changes nothing.
"""
