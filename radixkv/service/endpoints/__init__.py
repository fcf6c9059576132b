"""What the endpoints do, one module a subject."""
