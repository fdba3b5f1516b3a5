"""``Checkpoint``: a validated official-format checkpoint, memory-mapped.

Opening reads config, index and shard headers only (milliseconds) and refuses with every problem at once. Tensors are
views of the mapped files in their stored form; torch is imported when the first one is asked for.
"""

from __future__ import annotations

import errno
import gc
import hashlib
import mmap
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deepinfer_engine.config.model import ModelConfig
from deepinfer_engine.config.model_v4 import AnyConfig, parse_any_config, require_v41
from deepinfer_engine.config.strict_json import read_json_object
from deepinfer_engine.errors import ArtefactError, CapacityError, CheckpointError
from deepinfer_engine.weights.header import ShardHeader, StoredTensor
from deepinfer_engine.weights.plan import tensor_plan
from deepinfer_engine.weights.tensor_spec import Group, TensorSpec
from deepinfer_engine.weights.validate import Inventory, check_plan, scan_directory

if TYPE_CHECKING:
    import torch

#: torch dtype that views the stored bytes; E8M0 and packed FP4 stay raw, because a numeric copy destroys them.
_TORCH_DTYPE = {
    "F8_E4M3": "float8_e4m3fn", "F8_E8M0": "uint8", "I8": "int8", "BF16": "bfloat16", "F32": "float32", "I64": "int64",
}  # fmt: skip

#: The digest hashes small payloads whole and ``_SAMPLES`` places of ``_SAMPLE_BYTES`` of larger ones, so that equal
#: shapes are not taken for equal weights. 16 MiB hash in about 10 ms.
_WHOLE_BYTES = 16 * 1024 * 1024
_SAMPLE_BYTES = 4096
_SAMPLES = 8

# Private maps are charged against the commit limit unless told not to; a 101 GB Engram shard must map on a 64 GB host.
_MAP_NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000 if sys.platform == "linux" else 0)


class Checkpoint:
    """An open checkpoint. Make one with ``Checkpoint.open``; files are mapped on first use and never written."""

    def __init__(self, directory: Path, raw_config: dict[str, Any], config: AnyConfig, plan: dict[str, TensorSpec],
                 files: dict[str, str], inventory: Inventory):  # fmt: skip
        self.directory, self.raw_config, self.any_config, self.plan = directory, raw_config, config, plan
        self.warnings = inventory.warnings
        self._files, self._inventory = files, inventory
        self._maps: dict[str, mmap.mmap] = {}

    @classmethod
    def open(cls, directory: str | Path, *, groups: Iterable[Group] = ("backbone", "engram")) -> Checkpoint:
        """Validate the checkpoint in ``directory``; the tensors of ``groups`` must all be there.

        Other groups may be wholly absent; a group that the config does not have needs nothing.
        Raises ``CheckpointError`` with every problem (exit 4).
        """
        directory = Path(directory)
        if not directory.is_dir():
            raise ArtefactError(f"{directory}: not a directory", hint="give a directory that holds config.json")
        raw_config = read_json_object(directory / "config.json")
        config = parse_any_config(raw_config, where=str(directory / "config.json"))
        problems: list[str] = []
        with _collector_paused():
            plan = tensor_plan(config)
            inventory = scan_directory(directory, problems)
            files = check_plan(plan, inventory, groups, problems, block=config.weight_block)
        if problems:
            raise CheckpointError(str(directory), problems, hint="fetch the checkpoint again, or compare its files")
        return cls(directory, raw_config, config, plan, files, inventory)

    @property
    def config(self) -> ModelConfig:
        """The config of a model that this engine runs; raises ``ArtefactError`` for a V4 checkpoint."""
        return require_v41(self.any_config, where=str(self.directory))

    @cached_property
    def groups_present(self) -> frozenset[Group]:
        """Groups whose tensors are all there."""
        return frozenset(self.plan[name].group for name in self._files)

    @property
    def headers(self) -> dict[str, ShardHeader]:
        """Shard headers by file name."""
        return self._inventory.headers

    def has(self, name: str) -> bool:
        """Whether the tensor is stored in this checkpoint."""
        return name in self._files

    def file_of(self, name: str) -> Path:
        """Path of the shard that holds ``name``."""
        return self.directory / self._file(name)

    def stored(self, name: str) -> StoredTensor:
        """Dtype, shape and byte range of ``name`` inside its shard."""
        return self.headers[self._file(name)].tensors[name]

    def raw(self, name: str) -> memoryview:
        """The stored bytes of ``name``, read-only, not copied."""
        where = self.stored(name)
        return memoryview(self._map(self._file(name))).toreadonly()[where.begin : where.end]

    def tensor(self, name: str) -> torch.Tensor:
        """``name`` as stored, on the CPU: E4M3 as float8_e4m3fn, E8M0 scales as uint8, packed FP4 as int8.

        A view of the mapped file. Writing to it changes this process's copy of the page, never the file.
        """
        import torch

        where = self.stored(name)
        dtype = getattr(torch, _TORCH_DTYPE[where.dtype])
        if where.end == where.begin:
            return torch.empty(where.shape, dtype=dtype)
        source = self._map(self._file(name))
        flat = torch.frombuffer(source, dtype=torch.uint8, count=where.end - where.begin, offset=where.begin)
        if where.begin % dtype.itemsize:
            flat = flat.clone()  # a shard whose header is not padded to 8 bytes; views must be aligned
        self._check_values(name, flat)
        return flat.view(dtype).view(where.shape)

    def advise(self, name: str, advice: int) -> None:
        """``madvise`` for the pages that lie wholly inside ``name``."""
        where = self.stored(name)
        begin = -(-where.begin // mmap.PAGESIZE) * mmap.PAGESIZE
        if where.end > begin:
            self.advise_bytes(name, begin, where.end - begin, advice)

    def advise_bytes(self, name: str, begin: int, nbytes: int, advice: int) -> None:
        """``madvise`` for a page-aligned byte range of the shard that holds ``name``."""
        self._map(self._file(name)).madvise(advice, begin, nbytes)

    @cached_property
    def digest(self) -> str:
        """SHA-256 over the manifest: per shard its name, size, header hash and a hash of payload samples.

        A payload up to 16 MiB is hashed whole, a larger one at 8 evenly spread places of 4 KiB: another training run
        of the same shapes gets another digest, but a change of single weights in a large shard can escape it.
        """
        manifest = hashlib.sha256()
        for file, header in sorted(self.headers.items()):
            manifest.update(f"{file}\0{header.file_bytes}\0{header.digest}\0{_sample(header)}\n".encode())
        return manifest.hexdigest()

    def _file(self, name: str) -> str:
        try:
            return self._files[name]
        except KeyError:
            raise ArtefactError(f"{self.directory}: holds no tensor {name}") from None

    def _map(self, file: str) -> mmap.mmap:
        mapped = self._maps.get(file)
        if mapped is None:
            with (self.directory / file).open("rb") as handle:
                try:
                    mapped = mmap.mmap(
                        handle.fileno(),
                        0,
                        flags=mmap.MAP_PRIVATE | _MAP_NORESERVE,
                        prot=mmap.PROT_READ | mmap.PROT_WRITE,
                    )
                except OSError as exc:
                    if exc.errno != errno.ENOMEM:
                        raise
                    raise CapacityError(f"{self.directory / file}: {self.headers[file].file_bytes} bytes cannot be "
                                        "mapped", hint="raise the address-space or commit limit") from None  # fmt: skip
            if len(mapped) != self.headers[file].file_bytes:
                raise ArtefactError(f"{self.directory / file}: the file changed size after it was checked")
            self._maps[file] = mapped
        return mapped

    def _check_values(self, name: str, flat: torch.Tensor) -> None:
        import torch

        # Engram scales (12 GB each) are left to the gather, which sees the rows that are really used.
        if self.plan[name].kind in ("fp8_scale", "fp4_scale") and bool((flat == 255).any()):
            raise ArtefactError(f"tensor {name} in {self._file(name)}: scale byte 255 is not a number")
        if name.endswith(".tid2eid"):
            ids, experts = flat.view(torch.int64), self.any_config.n_routed_experts
            if bool(((ids < 0) | (ids >= experts)).any()):
                raise ArtefactError(f"tensor {name} in {self._file(name)}: names experts outside 0..{experts - 1}")


def no_draft_weights(directory: Path) -> ArtefactError:
    """Speculation is asked for, and a checkpoint that may be without its draft blocks is."""
    return ArtefactError(
        f"{directory}: holds no draft weights, which speculation needs", hint="--set spec.verify=off runs without them"
    )


@contextmanager
def _collector_paused() -> Iterator[None]:
    """No garbage collection while half a million objects are made that all stay: it would take a third of the time."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def _sample(header: ShardHeader) -> str:
    begin, end = header.payload_begin, header.file_bytes
    digest = hashlib.sha256()
    with header.path.open("rb") as file:
        if end - begin <= _WHOLE_BYTES:
            file.seek(begin)
            digest.update(file.read(end - begin))
        else:
            for i in range(_SAMPLES):
                file.seek(begin + (end - begin - _SAMPLE_BYTES) * i // (_SAMPLES - 1))
                digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()
