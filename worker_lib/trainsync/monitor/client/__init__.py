"""The library's side of the monitor: `base.MonitorClient`, and a module for each kind of monitor.

Begin at `base`; `http` is for pods, `local` for a monitor in this process, `disk` for a run's
directory without a monitor.
"""
