"""The bodies of requests and replies, a room a subject. OpenAPI is generated from these, so they are the interface.

Requests are strict: no text for a number, no unknown names (``tenant`` is one). A known optional field may be
null, which means that it was left out. Replies are built from these classes too, so that what is documented
is what is sent.
"""
