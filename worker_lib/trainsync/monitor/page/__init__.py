"""The monitor's page: what a person sees of a run at ``/``, read-only and by itself.

Begin at `routes`, which serves what `feed` makes once for all readers. `journal` remembers what
happened, `snapshot` collects the data of one refresh, `sections`, `timeline_svg` and `document`
make HTML.
"""
