"""Vendor kernel libraries: what they are called, what proves them, what is known not to be them, how they are built.

Their import names were published on package indexes by third parties, some as snapshots that cannot be built, so a
name proves nothing: a library counts when it has the functions that are called. A copy that was built into the kernel
cache (``<cache>/vendor/<name>/site``) is found before one in the environment; a process holds one copy. Imports no
torch and no library.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import sys
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from deepinfer_kernels.kernel_cache import default_cache

#: file in the folder of a library in the kernel cache that says what it was made of
MADE_OF = ".made-of.json"


class Capability(NamedTuple):
    """A function of a library, the module that has it, and what it is good for."""

    function: str
    purpose: str
    module: str = ""


@dataclass(frozen=True)
class Library:
    """A vendor library: its import package, what it must have, where it comes from.

    ``commit``: the state of ``repository`` that the adapters were written against, None where no public commit with
    these functions is known. ``distribution``: name of its wheel on the package index, where that one is the vendor's.
    """

    name: str
    capabilities: tuple[Capability, ...]
    repository: str
    commit: str | None
    licence: str = "MIT"
    distribution: str | None = None

    @property
    def install(self) -> str:
        """The command that installs it, or prints what is needed to."""
        return f"deepinfer build-kernels --vendor {self.name}"

    def module_of(self, function: str) -> str:
        """The module that has a function."""
        inner = next((c.module for c in self.capabilities if c.function == function), "")
        return f"{self.name}.{inner}" if inner else self.name


#: Facts: the public repositories at the commits below; the functions of later states from their published archives.
LIBRARIES: dict[str, Library] = {
    library.name: library
    for library in (
        Library(
            "deep_gemm",
            (
                Capability("bf16_gemm_nt", "BF16 products"),
                Capability("m_grouped_bf16_gemm_nt_contiguous", "grouped BF16 experts"),
                Capability("fp8_fp4_gemm_nt", "FP8/FP4 products"),
                Capability("m_grouped_fp8_fp4_gemm_nt_contiguous", "grouped experts"),
                Capability("fp8_fp4_mqa_logits", "index scores"),
                Capability("fp8_fp4_paged_sparse_mqa_logits", "candidate scores"),
                Capability("tf32_hc_prenorm_gemm", "mHC mixes"),
                Capability("einsum", "block-diagonal products"),
                Capability("fp8_fp4_mega_moe", "fused experts"),
            ),
            "https://github.com/deepseek-ai/DeepGEMM",
            "54e22612409371d6364144b69086735beb54e98b",
        ),
        Library(
            "flash_mla",
            (
                Capability("flash_mla_sparse_fwd", "sparse attention over BF16 rows"),
                Capability("flash_mla_with_kvcache", "sparse attention over records"),
                Capability("fused_norm_rope_attn_rope_cast", "the 528 and 288 byte records"),
            ),
            "https://github.com/deepseek-ai/FlashMLA",
            "9241ae3ef9bac614dd25e45e507e089f888280e0",
        ),
        Library(
            "deep_ep",
            (Capability("EPBuffer", "dispatch and combine"), Capability("EngramBuffer", "n-gram fetch")),
            "https://github.com/deepseek-ai/DeepEP",
            None,
        ),
        Library(
            "deep_select",
            (Capability("topk", "top-k selection", "interface"),),
            "https://github.com/deepseek-ai/DeepSelect",
            None,
        ),
        Library(
            "tile_kernels",
            (
                Capability("engram_hash", "n-gram rows", "engram"),
                Capability("engram_gate_fwd", "n-gram gate", "engram"),
                Capability("moe_topk_gate", "router", "moe"),
                Capability("per_token_cast", "quantised rows", "quant"),
                Capability("mhc_post_fwd", "mHC streams", "mhc"),
                Capability("apply_rotary", "rotary embedding", "transform"),
            ),
            "https://github.com/deepseek-ai/TileKernels",
            None,
            distribution="tile-kernels==2.1.0",
        ),
    )
}


class Placeholder(NamedTuple):
    """A distribution that holds a library's name: its version (None: any), the import package, what it is."""

    version: str | None
    package: str
    what: str


_SNAPSHOT = "a snapshot without its sources"
_COPY = "a copy of {} by an unknown uploader"
#: Under the natural names since February 2025, from the first public trees without the headers they need; and
#: repackaged copies that install the vendors' import names.
PLACEHOLDERS: dict[str, Placeholder] = {
    "deep-ep": Placeholder("1.0.0", "deep_ep", _SNAPSHOT),
    "deep-gemm": Placeholder("1.0.0", "deep_gemm", _SNAPSHOT),
    "flash-mla": Placeholder("1.0.0.dev0", "flash_mla", _SNAPSHOT),
    "hf3fs-py-usrbio": Placeholder("1.2.9", "hf3fs_fuse", _SNAPSHOT),
    "deepinfer-ep": Placeholder(None, "deep_ep", _COPY),
    "deepinfer-gemm": Placeholder(None, "deep_gemm", _COPY),
    "deepinfer-flashmla": Placeholder(None, "flash_mla", _COPY),
}


def placeholder(package: str) -> str | None:
    """One sentence about an installed distribution that holds the name of an import package; None without one.

    A snapshot installed from a repository is the vendor's own tree, so only those of a package index count.
    """
    for name, known in PLACEHOLDERS.items():
        if known.package != package:
            continue
        try:
            have = importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            continue
        if known.version in (None, have.version) and have.read_text("direct_url.json") is None:
            return f"{name} {have.version} is {known.what.format(package)}: pip uninstall {name}"
    return None


def site(name: str, cache: Path | None = None) -> Path:
    """The folder of the kernel cache that a library is built into."""
    return (cache or default_cache()) / "vendor" / name / "site"


def place(name: str, cache: Path | None = None) -> Path | None:
    """The folder a library would be imported from: the kernel cache's, or the environment's; None where it is in
    neither."""
    own = site(name, cache) / name
    if own.is_dir():
        return own
    found = (finder.find_spec(name, None) for finder in sys.meta_path)  # whatever is loaded already
    spec = next(filter(None, found), None)
    return None if spec is None else next(map(Path, spec.submodule_search_locations or ()), None)


def missing(name: str, functions: tuple[str, ...], cache: Path | None = None) -> str | None:
    """What keeps ``functions`` of a library from being called, in one sentence with the next step; None: nothing.

    Imports the library, unless it is absent or known to be a placeholder.
    """
    library = LIBRARIES[name]
    folder = place(name, cache)
    if folder is None:
        return f"{name} is not installed: {library.install}"
    squatter = placeholder(name)
    if squatter is not None and folder.parent != site(name, cache):
        return f"{squatter}, then {library.install}"
    lacking = []
    for wanted in functions:
        try:
            module = _imported(library.module_of(wanted), folder)
        except Exception as exc:  # whatever a library raises while it loads is the reason that it cannot be used
            reason = (str(exc).strip() or type(exc).__name__).splitlines()[0]
            return f"{name} is installed, but cannot be imported ({reason}): {library.install}"
        if not hasattr(module, wanted):
            lacking.append(wanted)
    other = _other(name, folder) if functions else None
    if other is not None:
        return f"this process has loaded another {name}, of {other}: a process has one, name its kernels.cache_dir"
    if lacking:
        return f"this {name} has no {' and no '.join(lacking)}: {library.install}"
    return None


#: held while the import path holds the folder of a library
_importing = threading.Lock()


def _imported(module: str, folder: Path) -> Any:
    """A module of a library in a folder, unless the library is loaded already."""
    with _importing:
        sys.path.insert(0, str(folder.parent))
        try:
            importlib.invalidate_caches()
            return importlib.import_module(module)
        finally:
            sys.path.remove(str(folder.parent))


def _other(name: str, folder: Path) -> Path | None:
    """Where a library was loaded from, if that is another copy than the one of a folder."""
    loaded = next(map(Path, sys.modules[name].__path__))
    if loaded == folder:
        return None
    try:
        same = (loaded.parent / MADE_OF).read_bytes() == (folder.parent / MADE_OF).read_bytes()
    except OSError:  # one of them was not built here
        same = False
    return None if same else loaded


def function(name: str, wanted: str) -> Any:
    """A function of a library. Raises ImportError or AttributeError where ``missing`` would have said why."""
    return getattr(importlib.import_module(LIBRARIES[name].module_of(wanted)), wanted)
