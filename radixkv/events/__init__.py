"""KV events: messages in vLLM's format that say which blocks become resident and which leave.

    event_settings      settings, which need no extra
    event_messages      digests of blocks, and the wire format
    event_stream        the journal of a cache, turned into numbered batches
    event_publisher     its sockets
    event_subscriber    a reader of one publisher; ``radixkv.coordination.view.event_view`` keeps what it reads

This package itself imports nothing.
"""
