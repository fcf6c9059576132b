"""Files of secrets and locks, and URLs with passwords, for every part of radixkv that is configured with them.

The settings of ``radixkv serve`` and ``radixkv route`` are in ``radixkv.service.options``. Importing these modules
loads only the standard library.
"""
