"""From a profile's ``cache`` section to the tiers below the device. No torch."""

from __future__ import annotations

from pathlib import Path

from deepinfer_engine.cache.layout import KVLayout
from deepinfer_engine.cache.prefix import namespace_root
from deepinfer_engine.cache.replay import ReplayShape
from deepinfer_engine.cache.store.interface import StoreOptions, open_store
from deepinfer_engine.cache.tiers import HostBlocks, Tiers, WindowPool
from deepinfer_engine.config.schema import Profile
from deepinfer_engine.weights.checkpoint import Checkpoint


def open_tiers(profile: Profile, shape: ReplayShape, checkpoint: Checkpoint, layout: KVLayout) -> Tiers:
    """Host memory, window pool and store of one process; its virtual ranks share them.

    Raises ``ArtefactError`` and ``NotReadyError`` of the store.
    """
    cache = profile.cache
    # the profile's rules refuse tiers for rows that have no record form
    assert layout.records or not (
        cache.host_gib_per_rank or cache.swa_pool_gib_per_rank or cache.store.backend != "none"
    )
    root = namespace_root(
        config=checkpoint.config.digest,
        weights=checkpoint.digest,
        numerics=profile.numerics.mode,
        layout=layout,
        tenant=cache.tenant,
    )
    ranks = profile.parallel.dp
    store, sources = None, ()
    if cache.store.backend != "none":
        assert cache.store.path is not None  # the profile's rules ask for it
        per_entry = layout.global_row_bytes + layout.index_row_bytes
        sources = tuple((s.layer, s.entries_per_block * per_entry) for s in layout.sources)
        options = StoreOptions(
            path=Path(cache.store.path),
            ttl_s={"agent": cache.store.ttl_s.agent, "chat": cache.store.ttl_s.chat},
            capacity=int(cache.store.capacity_gib * 2**30),
            namespace=root,
            sections=sources,
        )
        store = open_store(options, cache.store.backend)
    return Tiers(
        root=root,
        host=HostBlocks(int(cache.host_gib_per_rank * ranks * 2**30)),
        windows=WindowPool(
            int(cache.swa_pool_gib_per_rank * ranks * 2**30),
            cache.swa_pool_ttl_s,
            shape.snapshot_layers,
            strict=cache.strict_lineage,
        ),
        store=store,
        sources=sources if len(sources) > 1 else (),
        fetch_s=cache.store.fetch_deadline_ms / 1000,
    )
