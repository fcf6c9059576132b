"""Host memory as a tier: which block lies where, and who copies it."""
