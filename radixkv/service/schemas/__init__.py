"""The bodies of requests and replies, one module a subject. OpenAPI is generated from them, so they are the interface.

Requests are strict: no text for a number, no unknown fields (``tenant`` is one). A known optional field may be null,
which has the same meaning as leaving it out. Replies are built from these classes too, so the service sends what the
document describes.
"""
