"""Block names, reference counts and eviction against a model that keeps plain sets; tiers and their lifetimes."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from deepinfer_engine.cache.layout import KVLayout
from deepinfer_engine.cache.pool import IdPool
from deepinfer_engine.cache.prefix import DeviceBlocks, extend_keys, namespace_root, window_key
from deepinfer_engine.cache.tiers import HostBlocks, Payload, WindowPool, match_prefix
from deepinfer_engine.config.model import load_model_config
from deepinfer_engine.errors import CapacityError

VECTORS = Path(__file__).resolve().parents[2] / "vectors"
LAYOUT = KVLayout.of(load_model_config(VECTORS / "v41-flash-config.json"), records=True)
FACTS = {"config": "c", "weights": "w", "numerics": "fast", "layout": LAYOUT, "tenant": ""}
ROOT = namespace_root(**FACTS)


def keys_of(tokens, root=ROOT):
    return extend_keys(root, [], tokens)


def test_any_change_of_namespace_changes_every_key():
    tokens = list(range(300))
    other = KVLayout.of(load_model_config(VECTORS / "v41-flash-config.json"), records=False)
    seen = {keys_of(tokens)[0]}
    for change in ({"config": "d"}, {"weights": "x"}, {"numerics": "reference"}, {"tenant": "a"}, {"layout": other}):
        keys = keys_of(tokens, namespace_root(**{**FACTS, **change}))
        assert keys[0] not in seen and keys[1] != keys_of(tokens)[1]
        seen.add(keys[0])


def test_a_key_covers_all_tokens_up_to_its_end_and_grows_by_whole_blocks():
    tokens = list(range(1000))
    keys = keys_of(tokens)
    assert len(keys) == 7 and len(set(keys)) == 7
    for position in (0, 127, 128, 500):
        changed = keys_of([*tokens[:position], 5000, *tokens[position + 1 :]])
        same = position // 128
        assert changed[:same] == keys[:same] and not set(changed[same:]) & set(keys)
    grown: list[bytes] = []
    for end in (0, 100, 128, 129, 640, 1000):
        assert extend_keys(ROOT, grown, tokens[:end]) is grown
        assert grown == keys[: end // 128]


class Blocks(RuleBasedStateMachine):
    """Random sharing, taking, publishing and releasing, beside a model of plain sets and lists."""

    TOTAL = 7

    def __init__(self):
        super().__init__()
        self.real = DeviceBlocks(IdPool(self.TOTAL, "blocks"))
        self.owned: list[list[int]] = []
        self.names: dict[bytes, int] = {}
        self.last_use: dict[int, int] = {}
        self.clock = 0
        self.serial = 0

    def users(self, block):
        return sum(s.count(block) for s in self.owned)

    @rule(n=st.integers(1, 4))
    def take(self, n):
        kept = [b for b in self.names.values() if not self.users(b)]
        never = self.TOTAL - len({b for s in self.owned for b in s} | set(kept))
        if n > never + len(kept):
            with pytest.raises(CapacityError, match=f"{n} blocks needed"):
                self.real.take(n)
            return
        blocks, spilled = self.real.take(n)
        oldest = sorted(kept, key=lambda b: self.last_use[b])[: max(0, n - never)]
        assert [s.block for s in spilled] == oldest
        for s in spilled:
            assert self.names.pop(s.key) == s.block
        assert len(set(blocks)) == n and not any(self.users(b) for b in blocks)
        assert not set(blocks) & set(self.names.values())
        self.owned.append(blocks)

    @precondition(lambda self: self.owned)
    @rule(data=st.data())
    def publish(self, data):
        block = data.draw(st.sampled_from(data.draw(st.sampled_from(self.owned))))
        key = bytes([data.draw(st.integers(0, 9))])
        fresh = key not in self.names and block not in self.names.values()
        assert self.real.publish(block, key) is fresh
        if fresh:
            self.names[key] = block

    @precondition(lambda self: self.names)
    @rule(data=st.data())
    def share(self, data):
        keys = data.draw(st.lists(st.sampled_from(sorted(self.names)), min_size=1, unique=True))
        blocks = self.real.match(keys)
        assert blocks == [self.names[k] for k in keys]
        self.real.share(blocks)
        self.owned.append(blocks)

    @precondition(lambda self: self.owned)
    @rule(data=st.data())
    def release(self, data):
        blocks = self.owned.pop(data.draw(st.integers(0, len(self.owned) - 1)))
        self.real.release(blocks)
        for block in reversed(blocks):
            self.clock += 1
            self.last_use[block] = self.clock

    @precondition(lambda self: self.names)
    @rule(data=st.data())
    def drop(self, data):
        key = data.draw(st.sampled_from(sorted(self.names)))
        self.real.drop(key)
        del self.names[key]
        assert self.real.find(key) is None

    @invariant()
    def counts_agree(self):
        self.real.check()
        used = {b for s in self.owned for b in s}
        assert self.real.used == len(used)
        assert self.real.kept == sum(b not in used for b in self.names.values())
        assert self.real.free == self.TOTAL - len(used)


Blocks.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestBlocks = Blocks.TestCase


def test_of_one_sequence_the_last_block_goes_first():
    device = DeviceBlocks(IdPool(4, "blocks"))
    blocks, _ = device.take(4)
    keys = keys_of(list(range(512)))
    for block, key in zip(blocks, keys, strict=True):
        device.publish(block, key)
    device.release(blocks)
    _, spilled = device.take(2)
    assert [s.key for s in spilled] == [keys[3], keys[2]]
    assert device.match(keys) == blocks[:2]


def test_host_blocks_drop_the_least_recently_used_and_refuse_what_cannot_fit():
    host = HostBlocks(30)
    for name in (b"a", b"b", b"c"):
        assert host.put(name, Payload(bytes(10)))
    assert host.get(b"a") is not None
    assert host.put(b"d", Payload(bytes(10)))
    assert b"b" not in host and b"a" in host and host.stats.bytes == 30
    assert not host.put(b"e", Payload(bytes(31))) and len(host) == 3
    assert host.put(b"a", Payload(bytes(5))) and host.stats.bytes == 25
    assert host.get(b"zz") is None and (host.stats.hits, host.stats.misses, host.stats.evicted) == (1, 1, 1)


def test_windows_expire_after_their_last_use_and_layers_are_part_of_the_name():
    pool = WindowPool(100, 180.0, range(21))
    assert pool.put(b"k", Payload(bytes(40)), now=0.0)
    assert pool.get(b"k", now=179.9) is not None
    assert pool.has(b"k", now=300.0) and not pool.has(b"k", now=360.0)
    assert pool.get(b"k", now=360.0) is None
    assert pool.stats.expired == 1 and pool.stats.bytes == 0
    assert window_key(b"k", range(21)) != window_key(b"k", range(40))


def test_strict_pools_refuse_replayed_windows_and_exact_ones_are_never_replaced_by_them():
    pool = WindowPool(100, 180.0, range(21), strict=True)
    assert not pool.put(b"k", Payload(b"x", replayed=True), now=0.0) and len(pool) == 0
    loose = WindowPool(100, 180.0, range(21))
    loose.put(b"k", Payload(b"exact"), now=0.0)
    loose.put(b"k", Payload(b"about", replayed=True), now=1.0)
    assert loose.get(b"k", now=2.0) == Payload(b"exact")


class FakeStore:
    """A lower tier that holds some keys."""

    def __init__(self, held):
        self.held = set(held)
        self.asked = 0

    def match(self, keys):
        self.asked += 1
        n = 0
        while n < len(keys) and keys[n] in self.held:
            n += 1
        return n


def test_a_match_continues_over_tiers_and_ends_at_the_first_hole():
    keys = keys_of(list(range(128 * 8)))
    device, host = DeviceBlocks(IdPool(8, "blocks")), HostBlocks(1000)
    windows = WindowPool(1000, 60.0, range(3))
    blocks, _ = device.take(2)
    device.publish(blocks[0], keys[0], replayed=True)
    device.publish(blocks[1], keys[4])
    host.put(keys[1], Payload(b"1"))
    store = FakeStore({keys[2], keys[3], keys[5], keys[7]})
    windows.put(keys[3], Payload(b"w"), now=0.0)
    windows.put(keys[7], Payload(b"w"), now=0.0)
    found = match_prefix(keys, device, host, store, windows, now=1.0)
    assert found.blocks == (blocks[0], None, None, None, blocks[1], None)
    assert (found.hit_tokens, found.host, found.store) == (768, 1, 3)
    assert found.windows_at == {512} and found.approximate
    assert match_prefix(keys, device, host, None, windows, now=1.0).hit_tokens == 256


def test_lookup_of_77k_tokens_takes_under_5_ms():
    tokens = tuple((i * 7919) % 129_280 for i in range(77_056))
    device, host = DeviceBlocks(IdPool(602, "blocks")), HostBlocks(0)
    windows = WindowPool(0, 1.0, range(1))
    blocks, _ = device.take(602)
    for block, key in zip(blocks, keys_of(tokens), strict=True):
        device.publish(block, key)
    times = []
    for _ in range(7):
        begin = time.thread_time()  # what the lookup takes, not what other work on the machine does
        found = match_prefix(keys_of(tokens), device, host, None, windows, 0.0)
        times.append(time.thread_time() - begin)
    assert found.hit_tokens == 77_056
    assert min(times) < 5e-3
