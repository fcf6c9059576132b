"""radixkv inside SGLang 0.5.23: ``--radix-cache-backend radixkv``.

SGLang finds ``plugin`` by its entry point, if radixkv is installed beside it.
"""

from radixkv._compiled import follow

follow(__path__, "engines/sglang")
