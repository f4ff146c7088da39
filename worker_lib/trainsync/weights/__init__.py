"""New weights from trainers to explorers: packing, the Synchronizer, and the explorer's side."""
