"""Which replica should get a prompt."""
