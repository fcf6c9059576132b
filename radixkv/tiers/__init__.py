"""Tiers below the device: host memory, a disk and tiers of one's own keep KV that the cache evicted.

    tier          the protocol of a tier, and what a tier says of itself
    ladder        the tiers below one cache: what goes down, comes back, and is forgotten
    tiered_cache  a cache that shows its tiers
    loading       a request's way back from the tiers
    prefetch      prompts that are expected: what a disk has of them comes into host memory
    pending       what tiers still have to destroy of what was forgotten
    further       tiers that somebody brings
    usefulness    in words, whether a tier is of use
    fair_lock     the lock of a ladder, which threads get in the order in which they asked for it
    unusable_disk a disk that couldn't be opened at the start
    settings      the tiers of a server, checked before anything is opened
    host/         host memory: ``index`` (which block has which slot, and what makes way), ``steps`` (what is saved
                  when), ``memory`` (the bytes, and their copies to and from the device), ``tier``
    disk/         sealed records in one folder: ``demotions`` (which blocks go there, when), ``promotions`` (which come
                  back into host memory: for vLLM's requests, and ahead), ``patience``, ``write_budget``, ``records``
                  (sealing), ``folder`` (keys), ``tier``

A record on disk is bytes under an identity, and comes back only under the same one. The disk needs the extra ``tiers``.
"""
