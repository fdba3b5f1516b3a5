"""The only place where a TileLang kernel is launched, so that it can be recorded instead and compiled ahead of time."""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false

from __future__ import annotations

import ctypes
import hashlib
import importlib.util
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deepinfer_kernels import kernel_cache
from deepinfer_kernels.tilelang import families


class NotBuilt(Exception):
    """A kernel was not compiled ahead for the sizes of a call."""


@dataclass(frozen=True)
class Call:
    """One launch: ``program`` is "module.function", ``sizes`` are its compile-time arguments by name."""

    program: str
    sizes: tuple[tuple[str, int | str], ...]

    @property
    def module(self) -> str:
        return self.program.partition(".")[0]

    def stem(self) -> str:
        """The part of a library's name that says what is in it; a toolchain and a digest of its bytes follow."""
        sizes = hashlib.sha256(repr(self.sizes).encode()).hexdigest()[:8]
        return f"{self.program}-{families.source_key(self.module)}-{sizes}"


#: functions by folder, program and sizes
_loaded: dict[tuple, Any] = {}
#: libraries by name, which holds a digest of the bytes: engines share those that their caches both have
_libraries: dict[str, Any] = {}
#: who is told of the launches of this thread instead, and the platform they would be for
_recorder: ContextVar[tuple[Callable[[Call], None], str] | None] = ContextVar("recorder", default=None)


@contextmanager
def recording(record: Callable[[Call], None], platform: str) -> Iterator[None]:
    """Hand this thread's launches to ``record`` instead of a device; operations may be called with tensors without
    memory."""
    before = _recorder.set((record, platform))
    try:
        yield
    finally:
        _recorder.reset(before)


def launch(program: str, sizes: Mapping[str, int | str], *args: Any) -> None:
    """Run a program on torch's current stream of its tensors' device.

    Raises ``NotBuilt`` where the kernel cache has no library of these sizes.
    """
    recorder = _recorder.get()
    if recorder is not None:
        recorder[0](Call(program, tuple(sizes.items())))
        return
    key = (families.folder.get(), program, *sizes.values())
    fn = _loaded.get(key)
    if fn is None:
        fn = _loaded[key] = _load(Call(program, tuple(sizes.items())))
    fn(*args)


def platform() -> str:
    """What launches are for: sm90 or sm100."""
    recorder = _recorder.get()
    return families.platform() if recorder is None else recorder[1]


def library(call: Call, folder: Path) -> Path | None:
    """The newest intact library of a call in a folder, by whichever toolchain; None without one."""
    return kernel_cache.find(folder, f"{call.stem()}-*", "so")


def _load(call: Call) -> Any:
    folder = families.folder.get()
    path = None if folder is None else library(call, folder)
    if folder is None or path is None:
        target = "sm90 or sm100" if folder is None else folder.name
        sizes = ", ".join(f"{name}={value}" for name, value in call.sizes)
        raise NotBuilt(
            f"no kernel {call.program}({sizes}) in {folder or kernel_cache.default_cache()}: "
            f"deepinfer build-kernels --target {target} --model MODEL --profile PROFILE, those that are served"
        )
    import tvm_ffi

    _runtime()
    loaded = _libraries.get(path.name) or _libraries.setdefault(path.name, tvm_ffi.load_module(str(path)))
    return loaded[call.program.partition(".")[2]]


def _runtime() -> None:
    """Load what registers CUDA modules and TMA's descriptors with tvm_ffi, without the import that takes seconds."""
    spec = importlib.util.find_spec("tilelang")
    if spec is None or spec.origin is None:
        raise NotBuilt("tilelang is not installed: pip install 'deepinfer-cli[tilelang]'")
    try:
        ctypes.CDLL(str(Path(spec.origin).parent / "lib" / "libtilelang.so"), ctypes.RTLD_GLOBAL)
    except OSError as exc:
        raise NotBuilt(f"tilelang cannot be loaded ({exc}): pip install 'deepinfer-cli[tilelang]'") from None
