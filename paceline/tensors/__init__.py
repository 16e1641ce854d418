"""How tensors move: the fixed tree, shared memory, process groups."""
