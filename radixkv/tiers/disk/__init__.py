"""Disk as a tier: sealed records in one folder, found again after a restart.

    tier           the disk as a tier: what goes there, comes back, and is forgotten
      demotions    which blocks go to disk, when (``write_budget``, ``patience``), and what waits for that
      promotions   records that come back into host memory
    records        the records of a folder: each is sealed with the key of its tenant, and opens for nobody else
      slab         their file
      folder       the keys and generations of tenants
      identity     what a record is the KV of, and what proves it
      slots        which slot holds which record, and what each tenant may have of them
      io_threads   threads for I/O that may never return

``inspection`` checks, repairs and forgets a folder that no process uses.
"""
