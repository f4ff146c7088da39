"""The explorers of one Ray cluster read each object of the weights' store once, together.

Begin at `objects`, an explorer's side; `actor` is the Ray actor that it asks, and `offers` decides
which explorer reads the store (pure).
"""
