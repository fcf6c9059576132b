"""Tiers below the device: host memory and disk keep KV that the cache evicted.

    record_identity   what a record is the KV of, and what proves it
    slots             which slot of a tier holds which record, in memory
      slot_owners       what each tenant may have of them, and which loses a record next
    disk_tier         records on disk: sealed, and found again after a restart
      tier_lanes        threads with a queue of their own for each partition
      pace              a rate of bytes for operations that take turns
      folder            the keys and generations of tenants
      private_folder    the folder, its lock, small files
      slab              the file of all records
      io_threads        threads for I/O that may never return
      files             the system calls, replaced by tests
    durations         how long loads and operations took
    write_budget      which prompts are worth the bytes, if these are bounded
    inspection        check, repair and forget a folder

``radixkv.engines.disk_level`` uses it behind host memory, for caches and engines (``cache_tiers``, ``lower_tiers``).

Nothing here knows of trees or blocks: a tier stores bytes under an identity, and returns them only under the same one.
``disk_tier``, ``folder`` and ``slab`` need the extra ``tiers``.
"""
