"""Tiers below the device: host memory, a disk and tiers of one's own keep KV that the cache evicted.

    tier          the protocol of a tier, and what a tier says of itself
    ladder        the tiers below one cache: what goes down, comes back, and is forgotten
    tiered_cache  a cache that shows its tiers
    loading       a request's way back from the tiers
    prefetch      prompts that are expected: what a disk has of them comes into host memory
    pending       what tiers still have to destroy of what was forgotten
    further       tiers that somebody brings
    usefulness    in words, whether a tier is of use
    settings      the tiers of a server, checked before anything is opened
    host/         slots of host memory, and the copies to and from the device
    disk/         sealed records in one folder, found again after a restart

A record on disk is bytes under an identity, and comes back only under the same one. The disk needs the extra ``tiers``.
"""
