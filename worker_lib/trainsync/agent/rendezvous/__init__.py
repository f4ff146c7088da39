"""Messages between an agent and the run's monitor: reports of the server, hints of new versions.

Begin at `link`. While no monitor answers, the agent looks for versions by itself.
"""
