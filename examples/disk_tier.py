"""Keep the KV of a prompt on disk, and find it again after a restart. Needs the extra `tiers`.

python examples/disk_tier.py
"""

from __future__ import annotations

import tempfile

import numpy as np

from radixkv import Namespace
from radixkv.index.tokens import encode
from radixkv.tiers.disk.identity import fingerprint_of
from radixkv.tiers.disk.records import DiskRecords, DiskSettings

SEGMENT_TOKENS = 256
SECRET = b"the fleet's secret, from a file in practice"


def main() -> None:
    """Store two segments, restart, load them, and purge the tenant."""
    namespace, key = Namespace("acme", "llama-3-8b@4c2f"), encode(range(600))
    kv = np.random.default_rng(0).random((2, SEGMENT_TOKENS, 64), np.float32)
    with tempfile.TemporaryDirectory() as folder:
        settings = DiskSettings(
            folder,
            disk_bytes=8 << 20,
            record_bytes=kv[0].nbytes,
            segment_tokens=SEGMENT_TOKENS,
            fingerprint=fingerprint_of(weights="their SHA-256", layout="all that decides the bytes"),
        )
        with DiskRecords(settings, [SECRET]) as tier:
            for segment in range(2):
                job = tier.store(
                    namespace, key, segment, memoryview(kv[segment])
                )  # a thread encrypts and writes
                print(f"segment {segment} stored:", job is not None and job.wait(10.0))
        with DiskRecords(settings, [SECRET]) as tier:
            found = tier.locate(namespace, key, 0)  # from memory: segments in a row
            print("after a restart found:", found)
            for segment in range(found):
                into = np.zeros_like(kv[segment])
                job = tier.load(namespace, key, segment, memoryview(into))  # read, verified, decrypted
                is_there = job is not None and job.wait(10.0)  # False: a miss, compute it
                print(f"segment {segment} loaded:", is_there and np.array_equal(into, kv[segment]))
            print("another tenant finds:", tier.locate(namespace._replace(tenant="globex"), key, 0))
            print("purged:", tier.purge("acme"), "records; left:", tier.locate(namespace, key, 0))


if __name__ == "__main__":
    main()
