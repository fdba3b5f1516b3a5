"""One stored block: a 4 KiB header page that proves itself, then the payload, padded to 4 KiB.

Everything a reader trusts is in the record: magic, version, key, lengths, lifetimes, the sections of the payload (one
per source layer) and CRC-32s of the header and of every section (zlib's polynomial: 17 to 36 µs per block, and no
dependency), so that a section proves itself without the others. An index may be stale or lost; a record that does not
name the key asked for is a miss.

Header, little-endian: magic 8s · version u16 · flags u16 · payload bytes u32 · tokens u32 · key 32s · namespace 16s ·
created u64 · expiry u64 · section count u32 · sections (layer u32, offset u32, bytes u32, CRC u32)… · CRC-32 of bytes
0..4091 at 4092. A payload without known sections is one section of layer 0.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass

from deepinfer_engine.cache.tiers import Payload
from deepinfer_engine.config.model import BLOCK_TOKENS

#: alignment of direct I/O on every file system we know
PAGE = 4096
MAGIC = b"DIKVREC\x01"
VERSION = 2
_HEAD = struct.Struct("<8sHHII32s16sQQI")
_SECTION = struct.Struct("<IIII")
_CRC = struct.Struct("<I")
_REPLAYED = 1
MAX_SECTIONS = (PAGE - _HEAD.size - _CRC.size) // _SECTION.size
#: a block of the release is 113,920 bytes; nothing near this is one
MAX_PAYLOAD = 1 << 28


class BadRecord(Exception):
    """Bytes that are not the record asked for; the reader turns it into a miss."""


@dataclass(frozen=True)
class Header:
    """What a header page says. Times are Unix seconds; ``sections`` are (layer, offset, bytes, CRC)."""

    key: bytes
    namespace: bytes
    payload_bytes: int
    created: int
    expiry: int
    replayed: bool
    sections: tuple[tuple[int, int, int, int], ...]


def record_bytes(payload_bytes: int) -> int:
    """Size of a record on disk."""
    return PAGE + -(-payload_bytes // PAGE) * PAGE


def encode(
    buffer: memoryview,
    key: bytes,
    payload: Payload,
    *,
    namespace: bytes,
    created: int,
    expiry: int,
    sections: Sequence[tuple[int, int]] = (),
) -> int:
    """Write a record to the start of a page-aligned buffer; its size. ``sections``: (layer, bytes) in payload order."""
    data = memoryview(payload.data)
    table, at = b"", 0
    for layer, size in sections or ((0, len(data)),):
        table += _SECTION.pack(layer, at, size, zlib.crc32(data[at : at + size]))
        at += size
    assert at == len(data), "sections cover the payload"
    head = _HEAD.pack(
        MAGIC,
        VERSION,
        _REPLAYED if payload.replayed else 0,
        len(data),
        BLOCK_TOKENS,
        key,
        namespace[:16],
        created,
        expiry,
        len(sections) or 1,
    )
    page = (head + table).ljust(PAGE - _CRC.size, b"\0")
    total = record_bytes(len(data))
    buffer[:PAGE] = page + _CRC.pack(zlib.crc32(page))
    buffer[PAGE : PAGE + len(data)] = data
    if total > PAGE + len(data):
        buffer[PAGE + len(data) : total] = bytes(total - PAGE - len(data))
    return total


def decode_header(page: bytes | memoryview, key: bytes | None = None) -> Header:
    """The header of a page; ``BadRecord`` when it is anything else, or of another block than ``key``."""
    if len(page) < PAGE:
        raise BadRecord(f"{len(page)} of {PAGE} header bytes")
    fields = _HEAD.unpack_from(page)
    magic, version, flags, size, _, found, namespace, created, expiry, count = fields
    if magic != MAGIC:
        raise BadRecord("no record begins here")
    if _CRC.unpack_from(page, PAGE - _CRC.size)[0] != zlib.crc32(page[: PAGE - _CRC.size]):
        raise BadRecord("header CRC differs")
    if version != VERSION or size > MAX_PAYLOAD or not 0 < count <= MAX_SECTIONS:
        raise BadRecord(f"version {version}, {size} payload bytes, {count} sections")
    if key is not None and found != key:
        raise BadRecord("the record is another block's")
    sections = tuple(_SECTION.unpack_from(page, _HEAD.size + i * _SECTION.size) for i in range(count))
    return Header(found, namespace, size, created, expiry, bool(flags & _REPLAYED), sections)


def decode(record: memoryview, key: bytes) -> tuple[Header, Payload]:
    """Header and payload of the record of ``key``; ``BadRecord`` when a byte of it is wrong."""
    header = decode_header(record[:PAGE], key)
    if len(record) < PAGE + header.payload_bytes:
        raise BadRecord(f"{len(record) - PAGE} of {header.payload_bytes} payload bytes")
    data = bytes(record[PAGE : PAGE + header.payload_bytes])
    view = memoryview(data)
    for _, at, size, crc in header.sections:
        if zlib.crc32(view[at : at + size]) != crc:
            raise BadRecord("payload CRC differs")
    return header, Payload(data, header.replayed)


def section_pages(sections: Sequence[tuple[int, int]], index: int) -> tuple[int, int]:
    """(offset, bytes) within a record of the pages that hold section ``index``; those of the first hold the header."""
    begin = PAGE + sum(size for _, size in sections[:index])
    end = -(-(begin + sections[index][1]) // PAGE) * PAGE
    begin = 0 if index == 0 else begin // PAGE * PAGE
    return begin, end - begin


def decode_section(pages: memoryview, header: Header, index: int) -> bytes:
    """Section ``index`` out of its pages; ``BadRecord`` when a byte of it is wrong."""
    sections = [(layer, size) for layer, _, size, _ in header.sections]
    if not index < len(sections):
        raise BadRecord(f"section {index} of {len(sections)}")
    _, at, size, crc = header.sections[index]
    inside = PAGE + at - section_pages(sections, index)[0]
    data = bytes(pages[inside : inside + size])
    if len(data) != size or zlib.crc32(data) != crc:
        raise BadRecord("payload CRC differs")
    return data
