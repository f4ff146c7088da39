"""Whether a server has the weights of its version: a proof is read, asked for and judged."""
