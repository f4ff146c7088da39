"""A copy of each kept file in the memory of another node, and loads from there.

Nothing of the run's choice is made here: the step is the one that the monitor named, the same for
all ranks, and a file counts only with the digest that the step's manifest says. So it does not
matter which process sent a file, or how old the copy is.

- `neighbour`: what a saving process does: it copies its files to a partner, and takes those of
  another. `copying` sends, `pace` says how fast, `roster` says who
  that is.
- `fetching`: what loading ranks do: they say which files each has in memory and which it lacks,
  and fetch from one another.
- `serving` answers both, `wire` is what goes over TCP, `secret` the run's key for it.
"""
