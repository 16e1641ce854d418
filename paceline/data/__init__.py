"""What each slot trains on: the order of samples, how a batch is cut, where samples come from."""
