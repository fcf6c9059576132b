"""Disk as a tier: sealed records in one folder, found again after a restart.

    tier           the records of a folder
      slab         their file
      folder       the keys and generations of tenants
      identity     what a record is the KV of, and what proves it
      slots        which slot holds which record, and what each tenant may have of them (``slot_owners``)
      io_threads   threads for I/O that may never return
    stores         which blocks go to disk, when (``write_budget``, ``patience``), and what waits (``waiting_stores``)
    promotions     records that come back

``inspection`` checks, repairs and forgets a folder that no process uses.
"""
