"""Agreement between the ranks of a process group, always with a deadline.

Begin at `agreement`, which `group_agreement` opens for a process group of torch, or at `rank_zero`
where rank 0 tells and does not wait; `heartbeat` notices a rank that is gone, `store` bounds each
request to the store of the process group. Imports torch when used.
"""
