"""How processes talk: framed, both sides proven, bounded; and what a worker and its leader say."""
