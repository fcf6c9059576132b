"""The handlers of the endpoints, one module for each subject. ``/openapi.json`` shows their docstrings."""
