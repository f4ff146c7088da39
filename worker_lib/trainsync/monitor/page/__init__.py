"""The monitor's page: what a person sees of a run at ``/``, read-only and by itself.

Begin at `routes`, which serves what `feed` makes once for all readers. `journal` remembers what
happened, `snapshot` puts one look together, `sections`, `timeline_svg` and `document` make HTML.
"""
