"""The monitor's page: what a person sees of a run at ``/``, read-only and by itself.

`journal` remembers what happened, `snapshot` puts one look together, `sections`, `timeline_svg`
and `document` make HTML of it, `feed` makes that once for all readers, and `routes` serves it.
"""
