"""What should exist for a run: one pure function for each kind of child, one file each."""
