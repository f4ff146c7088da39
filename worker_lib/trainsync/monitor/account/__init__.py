"""The account of a run: each GPU-second of its pods in one class.

Begin at `account`, which hears of pods, reports and saves, and says what each class is. `role_time`
sums the seconds of one role, `trainers` and `explorers` divide them (all pure), and `recorder`
gives them the time and writes the account.
"""
