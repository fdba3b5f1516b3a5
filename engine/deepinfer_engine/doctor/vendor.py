"""Vendor kernel libraries, recognised by what they can do.

Their import names have been published on the package index by third parties, some as snapshots that cannot be built,
so a name proves nothing: a library counts when it has the functions that are called, and a known placeholder on disk
is reported whatever it claims. Libraries are imported in a child process, and only where their device exists.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from deepinfer_engine.doctor.finding import Finding, failed, passed, warned
from deepinfer_engine.doctor.system import System


class _Vendor(NamedTuple):
    """An import package, the module to look into, what each function proves, how the real one is installed."""

    package: str
    module: str
    capabilities: tuple[tuple[str, str], ...]
    install: str


_VENDORS = (
    _Vendor(
        "deep_gemm",
        "deep_gemm",
        (
            ("fp8_fp4_gemm_nt", "FP8/FP4 products"),
            ("m_grouped_fp8_fp4_gemm_nt_masked", "grouped experts"),
            ("fp8_fp4_paged_mqa_logits", "index scores"),
            ("fp8_fp4_paged_sparse_mqa_logits", "candidate scores"),
            ("fp8_fp4_mega_moe", "fused experts"),
        ),
        "git clone --recursive https://github.com/deepseek-ai/DeepGEMM and run its install.sh",
    ),
    _Vendor(
        "flash_mla",
        "flash_mla",
        (("flash_mla_sparse_fwd", "sparse prefill"), ("flash_mla_with_kvcache", "sparse decode")),
        "git clone --recursive https://github.com/deepseek-ai/FlashMLA and pip install it without build isolation",
    ),
    _Vendor(
        "deep_ep",
        "deep_ep",
        (("EPBuffer", "dispatch and combine"), ("EngramBuffer", "n-gram fetch")),
        "git clone https://github.com/deepseek-ai/DeepEP and pip install it without build isolation",
    ),
    _Vendor(
        "deep_select",
        "deep_select.interface",
        (("topk", "top-k selection"),),
        "git clone --recursive https://github.com/deepseek-ai/DeepSelect and pip install it",
    ),
)

#: Published under the natural names in February 2025 from the first public trees, without the headers they need.
_PLACEHOLDERS = {
    "deep-ep": ("1.0.0", "deep_ep"),
    "deep-gemm": ("1.0.0", "deep_gemm"),
    "flash-mla": ("1.0.0.dev0", "flash_mla"),
    "hf3fs-py-usrbio": ("1.2.9", "hf3fs_fuse"),
}
#: Repackaged copies by an unknown uploader; they install the vendor's import names.
_REPACKAGED = {"deepinfer-ep": "deep_ep", "deepinfer-gemm": "deep_gemm", "deepinfer-flashmla": "flash_mla"}


def check_names(system: System) -> Sequence[Finding]:
    """Distributions that hold a vendor's name without being the vendor's library."""
    findings: list[Finding] = []
    for name, (version, module) in _PLACEHOLDERS.items():
        have = system.distributions.get(name)
        if have is not None and have.from_index and have.version == version:
            found = f"{name} {version} from the package index is a snapshot without its sources; it shadows {module}"
            findings.append(failed("package names", found, f"pip uninstall {name}"))
    for name, module in _REPACKAGED.items():
        have = system.distributions.get(name)
        if have is not None:
            found = f"{name} {have.version} is a copy of {module} by an unknown uploader"
            findings.append(
                warned("package names", found, f"pip uninstall {name}, and build {module} from its repository")
            )
    return findings or [passed("package names", "no placeholder of a vendor library is installed")]


def check_capabilities(system: System, platform: str) -> Sequence[Finding]:
    """What each installed vendor library can do; absence is no fault, the torch reference computes the same."""
    findings: list[Finding] = []
    absent: list[str] = []
    for vendor in _VENDORS:
        if system.module_file(vendor.package) is None:
            absent.append(vendor.package)
        elif platform == "cpu":
            findings.append(passed(vendor.package, "installed, not loaded: it needs an accelerator"))
        else:
            findings.append(_probe(system, vendor))
    if absent:
        findings.append(passed("vendor libraries", f"not installed: {', '.join(absent)}"))
    return findings


def _probe(system: System, vendor: _Vendor) -> Finding:
    names = tuple(name for name, _ in vendor.capabilities)
    has, reason = system.attributes(vendor.module, names)
    if reason is not None:
        return warned(vendor.package, f"installed, but it cannot be imported: {reason}", vendor.install)
    can = [text for name, text in vendor.capabilities if name in has]
    cannot = [text for name, text in vendor.capabilities if name not in has]
    if not can:
        return failed(
            vendor.package,
            f"has none of {', '.join(names)}: not the library of this name, or years too old",
            f"pip uninstall it; {vendor.install}",
        )
    if cannot:
        return warned(vendor.package, f"can {', '.join(can)}; lacks {', '.join(cannot)}", vendor.install)
    return passed(vendor.package, f"can {', '.join(can)}")
