"""What a script's loops do in one worker: batches in, committed steps out; what is kept of them."""
