"""A process that puts blocks until it is killed, printing the number of each acknowledged one."""

from __future__ import annotations

import sys
from pathlib import Path

from deepinfer_engine.cache.store.interface import StoreOptions, open_store
from deepinfer_engine.cache.tiers import Payload


def key_of(number: int) -> bytes:
    return number.to_bytes(32, "little")


def payload_of(number: int, size: int) -> bytes:
    return bytes((number * 131 + i) % 251 for i in range(64)) * (size // 64)


if __name__ == "__main__":
    backend, path, first, size = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
    store = open_store(StoreOptions(path, namespace=b"n" * 32), backend)
    number = first
    while True:
        store.put(key_of(number), Payload(payload_of(number, size)))
        sys.stdout.write(f"{number}\n")
        sys.stdout.flush()
        number += 1
