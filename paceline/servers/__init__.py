"""The parameter server: what it holds, who may go on, what counts once."""
