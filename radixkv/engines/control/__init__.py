"""Control of a cache in another process, over a socket in a private folder: purges, tenants, keys, counts.

server         beside the cache
client         its counterpart, and ``remote_cache``: a cache of the service that stands for such a one
tenants        settings of tenants by commands
channel        frames, and who may speak
"""
