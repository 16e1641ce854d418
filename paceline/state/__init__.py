"""What survives: hashes of weights, and files that others can load."""
