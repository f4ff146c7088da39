"""The explorers of one Ray cluster read each object of the weights' store once, together.

One explorer reads an object from the store and puts it into Ray's object store; the others get it
from there: in the same node's memory, or over Ray's transfers between nodes. `offers` decides which
explorer reads (pure), `actor` is the Ray actor that is asked, `objects` is an explorer's side.

Nothing depends on it: an explorer that gets no object this way within half of its time, or gets
other bytes, reads the store.
"""
