"""Parameters, tables and keys at servers: who holds what, who may go on, what counts once."""
