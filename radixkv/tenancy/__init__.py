"""How a tenant reaches an engine that knows none: in the salt of its requests, and from it to the cache's namespace.

salt           texts that name a namespace and prove it, which go through an engine as ``cache_salt``
request_keys   what an engine says of a request, as namespace and token ids of the cache
"""

from radixkv._compiled import follow

follow(__path__, "tenancy")
