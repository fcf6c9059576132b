"""Tiers below the device: host memory and disk keep KV that the cache evicted.

    host/       blocks in host memory, and the copies to and from the device
    disk/       sealed records in one folder, found again after a restart
    loading     a request's way back from the tiers
    prefetch    records of prompts that are expected
    pending     purges that a disk hasn't carried out yet
    settings    the tiers of a server, checked before anything is opened
    tier        what a tier says of itself

A record on disk is bytes under an identity, and comes back only under the same one. The disk needs the extra ``tiers``.
"""
