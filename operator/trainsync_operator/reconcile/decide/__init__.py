"""The next step of an attempt; pure, from the children as `observed` has them.

Begin at `attempts` (begin, restart with back-off, end); `failures` names the cause of a failure and
its class, `hindsight` corrects the class when a node's loss becomes known late, `failure_rules`
applies spec.failurePolicy.rules, `startup` watches the pods before there is a job, and `stopping`
asks for a save before pods go.
"""
