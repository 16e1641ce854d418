"""What survives: checkpoints, receipts, hashes of weights, and files that others can load."""
