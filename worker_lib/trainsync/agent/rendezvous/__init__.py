"""Messages between an agent and the run's monitor. Begin at `link`.

The agent reports of its server; the monitor tells of new versions, as hints to look at the run's
directory now. Without a monitor that answers, the directory is looked at as often as ever.
"""
