"""A worker among the others: how it enters a run, meets them, heals, waits and leaves."""
