"""Routing: which replica should get a prompt."""
