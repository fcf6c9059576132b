"""The handlers of the endpoints, one module a subject."""
