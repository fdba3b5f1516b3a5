"""Compile kernels ahead of time for a GPU that need not be there.

Two things are written under ``<cache>/<platform>``: a cubin per kernel, and Triton's own cache, where the same
launches find their kernels at run time. The cubin's name holds the key of Triton's, a digest of what it is made of:
its source and that of the functions it calls, the argument types, constants and options, the architecture, the sources
of triton, the version of ptxas.
"""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false

from __future__ import annotations

import base64
import functools
import hashlib
import importlib
import importlib.metadata
import io
import json
from collections.abc import Iterable
from contextlib import redirect_stdout
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas_version
from triton.compiler import ASTSource, CompilationError, make_backend
from triton.runtime.cache import get_cache_key
from triton.runtime.errors import PTXASError

from deepinfer_kernels.kernel_cache import Job
from deepinfer_kernels.shapes import Shapes
from deepinfer_kernels.triton.launch import Call

_POINTERS = {
    torch.bfloat16: "*bf16",
    torch.float32: "*fp32",
    torch.float64: "*fp64",
    torch.uint8: "*u8",
    torch.int16: "*i16",
    torch.int32: "*i32",
    torch.int64: "*i64",
}
ARCHITECTURES = {"sm90": 90, "sm100": 100}


@dataclass(frozen=True)
class Kernel:
    """One kernel to compile, in what can be sent to another process."""

    op: str
    module: str
    function: str
    signature: tuple[tuple[str, str], ...]
    constants: tuple[tuple[int, Any], ...]
    aligned: tuple[int, ...]
    options: tuple[tuple[str, int], ...]

    @classmethod
    def of(cls, op: str, call: Call) -> Kernel:
        """The kernel that a launch would compile at its first run."""
        signature, constants, aligned = [], [], []
        for i, name in enumerate(call.kernel.arg_names):
            value = call.constants[name] if name in call.constants else call.arguments[name]
            if name in call.constants or value is None:
                signature.append((name, "constexpr"))
                constants.append((i, value))
            elif isinstance(value, Tensor):
                signature.append((name, _POINTERS[value.dtype]))
                if not call.kernel.params[i].do_not_specialize_on_alignment:
                    aligned.append(i)  # every store and activation begins on 16 bytes
            else:
                signature.append((name, "fp32" if isinstance(value, float) else "i32"))
        fn = call.kernel.fn
        options = tuple(sorted(call.options.items()))
        return cls(op, fn.__module__, fn.__name__, tuple(signature), tuple(constants), tuple(aligned), options)

    @property
    def name(self) -> str:
        """The function and the module that it is in."""
        return f"{self.module.rpartition('.')[2]}.{self.function.lstrip('_')}"

    @property
    def sizes(self) -> dict[str, Any]:
        """What tells it from others of its name: constants, the types of the other arguments, options."""
        constants = {self.signature[i][0]: value for i, value in self.constants}
        return {name: constants.get(name, kind) for name, kind in self.signature} | dict(self.options)

    @property
    def source(self) -> ASTSource:
        """What Triton compiles."""
        return ASTSource(
            fn=getattr(importlib.import_module(self.module), self.function),
            signature=dict(self.signature),
            constexprs={(i,): value for i, value in self.constants},
            attrs={(i,): [["tt.divisibility", 16]] for i in self.aligned},
        )

    def key(self, platform: str) -> str:
        """Triton's own digest of everything the cubin depends on."""
        source, backend = self.source, make_backend(_target(platform))
        options = backend.parse_options(dict(self.options, **source.parse_options()))
        variables = triton._C.libtriton.get_cache_invalidating_env_vars()
        return hashlib.sha256(get_cache_key(source, backend, options, variables).encode()).hexdigest()


def _target(platform: str) -> GPUTarget:
    return GPUTarget("cuda", ARCHITECTURES[platform], 32)


def toolchain(platform: str) -> str:
    """Versions of triton and of the assembler it brings."""
    release = get_ptxas_version(ARCHITECTURES[platform]).strip().splitlines()[-1]
    return f"triton {importlib.metadata.version('triton')}, ptxas {release}"


def kernels(launches: Iterable[tuple[str, Call]]) -> list[Kernel]:
    """The different kernels among launches, in order."""
    return list(dict.fromkeys(Kernel.of(op, call) for op, call in launches))


def jobs(wanted: Iterable[Kernel], platform: str, cache: Path) -> list[Job]:
    """What makes each kernel's cubin; one that Triton would not find at run time is made again."""
    folder, made = cache / platform, []
    for kernel in wanted:
        stem, key = kernel.function.lstrip("_"), kernel.key(platform)
        entry = _entry(key, folder)
        compiled, served = partial(compile_one, kernel, platform, folder), partial(_serves, entry, kernel.function)
        made.append(Job(kernel.name, folder, f"{stem}-{key[:16]}", "cubin", compiled, served))
    return made


@dataclass(frozen=True)
class Absent:
    """A kernel that a cache does not serve; ``moved``: the folder it was made in, where that is another one."""

    name: str
    stem: str
    moved: str | None


@functools.lru_cache(maxsize=8)
def absent(
    shapes: Shapes, platform: str, cache: Path, invariant: bool, stamps: tuple[int, ...]
) -> dict[str, tuple[Absent, ...]]:
    """Operation → kernels of the sizes of a model that a cache does not serve; ``stamps``: when it was written."""
    from deepinfer_kernels.triton.shapes import launches

    wanted, found = kernels(launches(shapes, invariant=invariant)), {}
    for kernel, job in zip(wanted, jobs(wanted, platform, cache), strict=True):
        if job.find() is None:
            found.setdefault(kernel.op, []).append(Absent(job.name, job.stem, _moved(kernel, platform, cache)))
    return {op: tuple(names) for op, names in found.items()}


def _entry(key: str, folder: Path) -> Path:
    """The folder of a kernel in Triton's cache."""
    return folder / "triton" / base64.b32encode(bytes.fromhex(key)).decode().rstrip("=")


def _group(entry: Path, function: str) -> dict[str, str]:
    """Files of a kernel by name, as Triton will look for them: whole paths of when it was compiled."""
    return json.loads((entry / f"__grp__{function}.json").read_text())["child_paths"]


def _moved(kernel: Kernel, platform: str, cache: Path) -> str | None:
    """The kernel cache a kernel was compiled into, where it has been copied from there."""
    entry = _entry(kernel.key(platform), cache / platform)
    try:
        made = Path(_group(entry, kernel.function)[f"{kernel.function}.cubin"]).parent
    except (OSError, ValueError, KeyError):
        return None
    return None if made.resolve() == entry.resolve() else str(made.parent.parent.parent)


def _serves(entry: Path, function: str, cubin: Path) -> bool:
    """Whether a folder of Triton's cache is whole, was not moved, and holds the bytes of a cubin."""
    try:
        group = _group(entry, function)
        json.loads(Path(group[f"{function}.json"]).read_text())
        served = Path(group[f"{function}.cubin"]).read_bytes() == cubin.read_bytes()
        return served and all(
            Path(path).exists() and Path(path).parent.resolve() == entry.resolve() for path in group.values()
        )
    except (OSError, ValueError, KeyError):
        return False


def compile_one(kernel: Kernel, platform: str, folder: Path) -> bytes:
    """The cubin of a kernel, which Triton keeps in a folder too. Raises ``RuntimeError`` with what a compiler says."""
    # Triton prints the whole assembly beside an error of ptxas, and stdout is not for that
    with triton.knobs.cache.scope(), triton.knobs.compilation.scope(), redirect_stdout(io.StringIO()):
        triton.knobs.cache.dir = str(folder / "triton")
        triton.knobs.compilation.always_compile = True  # what is there may be damaged
        try:
            return triton.compile(kernel.source, target=_target(platform), options=dict(kernel.options)).asm["cubin"]
        except CompilationError as exc:
            raise RuntimeError(_said(exc)) from exc
        except PTXASError as exc:
            raise RuntimeError(str(exc).partition("stderr:\n")[2].strip() or str(exc)) from exc


def _said(exc: CompilationError) -> str:
    """The message at the innermost of the calls that a compilation error went through, and the line it is about."""
    while isinstance(exc.__cause__, CompilationError):
        exc = exc.__cause__
    lines, number = (exc.src or "").splitlines(), getattr(exc.node, "lineno", 0)
    about = f"{lines[number - 1].strip()}: " if 0 < number <= len(lines) else ""
    return f"{about}error: {' '.join((exc.error_message or 'it does not compile').split())}"
