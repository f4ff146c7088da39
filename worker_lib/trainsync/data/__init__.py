"""Which items of a dataset were trained: each once, also after a restart. Needs no torch.

Begin at `cursor.DataCursor`, which deals out numbers of items. `loader.TrackedLoader` does the
same for the batches of a dataloader, and `places.BatchCursor` deals out nothing: batches have
places. `errors` has what they raise.
"""
