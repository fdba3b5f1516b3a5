"""Every check, shown a machine on which it must pass and machines on which it must not, with the sentence it says."""

from __future__ import annotations

import importlib.util
import re
import shutil
import sys
from pathlib import Path

import pytest

from deepinfer_engine.config.profile import load_profile, load_profile_text
from deepinfer_engine.doctor import (
    accelerator,
    implementations,
    libraries,
    network,
    packages,
    storage,
    toolchain,
    vendor,
)
from deepinfer_engine.doctor.diagnose import checks, diagnose
from deepinfer_engine.doctor.finding import Check, Finding, run_checks
from deepinfer_engine.doctor.system import System, at_least, version_tuple
from deepinfer_engine.errors import CapacityError, ProfileError
from deepinfer_kernels.vendor.libraries import LIBRARIES

_spec = importlib.util.spec_from_file_location("doctor_machines", Path(__file__).with_name("machines.py"))
assert _spec is not None and _spec.loader is not None
machines = importlib.util.module_from_spec(_spec)
sys.modules["doctor_machines"] = machines
_spec.loader.exec_module(machines)
Machine, cuda_torch, cpu_torch, npu_torch, distribution = (
    machines.Machine, machines.cuda_torch, machines.cpu_torch, machines.npu_torch, machines.distribution,
)  # fmt: skip


def profile(name, *sets):
    return load_profile(name, sets).profile


def one(findings, name):
    (finding,) = [f for f in findings if f.name == name]
    return finding


def expect(findings, name, status, *parts):
    finding = one(findings, name)
    assert finding.status == status, finding
    text = f"{finding.found} | {finding.fix} | {' | '.join(finding.details)}"
    for part in parts:
        assert part in text
    return finding


# ----------------------------------------------------------------- the runner


def test_crashing_check_fails_with_its_reason_and_the_others_still_run():
    def crash():
        raise RuntimeError("no such bus")

    def refuse():
        raise CapacityError("needs 9 GiB, has 4", hint="buy memory")

    fine = Finding("c", "pass", "well")
    diagnosis = run_checks([Check("g", "a", crash), Check("g", "b", refuse), Check("g", "c", lambda: [fine])])
    a, b, c = (f for _, f in diagnosis.findings)
    assert a.status == "fail" and a.found == "the check itself failed: RuntimeError: no such bus"
    assert (b.status, b.found, b.fix) == ("fail", "needs 9 GiB, has 4", "buy memory")
    assert c is fine
    assert (diagnosis.count("pass"), diagnosis.count("fail")) == (1, 2)
    assert diagnosis.failures == (a, b)


def test_a_finding_that_did_not_pass_has_a_fix():
    with pytest.raises(AssertionError):
        Finding("x", "fail", "broken")
    with pytest.raises(AssertionError):
        Finding("x", "pass", "fine", "do something")


def test_broken_torch_is_one_failure_and_not_a_crash(tmp_path):
    machine = Machine(tmp_path, torch=ImportError("libcudart.so.13: cannot open shared object file"))
    diagnosis = diagnose(system=machine)
    torch = one([f for _, f in diagnosis.findings], "torch")
    assert torch.status == "fail" and "libcudart.so.13" in torch.found
    assert one([f for _, f in diagnosis.findings], "operations").status == "pass"


def test_every_check_has_a_group_and_a_subject(tmp_path):
    for check in checks(profile("h200x8"), None, Machine(tmp_path)):
        assert check.group and check.subject


# ---------------------------------------------------------------- accelerator


def test_devices_that_torch_cannot_use_fail(tmp_path):
    machine = Machine(tmp_path, files={"/dev/nvidia0": "", "/dev/nvidia1": "", "/dev/nvidiactl": ""})
    expect(accelerator.check_devices(machine), "device", "fail", "2 NVIDIA devices under /dev", "CUDA build of torch")
    machine = Machine(tmp_path / "npu", files={"/dev/davinci0": ""})
    expect(accelerator.check_devices(machine), "device", "fail", "1 Ascend devices", "torch_npu build")


@pytest.mark.parametrize(
    ("capability", "built_for", "status"),
    [
        ((9, 0), ("sm_80", "sm_90"), "pass"),
        ((8, 9), ("sm_80",), "pass"),  # the same family, newer minor
        ((10, 3), ("sm_100",), "pass"),
        ((10, 3), ("sm_100a",), "fail"),  # an exact build runs nowhere else
        ((10, 0), ("sm_90",), "fail"),
        ((10, 0), ("sm_90", "compute_90"), "pass"),  # compiled on first use
        ((9, 0), ("sm_100",), "fail"),
        ((12, 0), ("sm_120",), "pass"),
    ],
)
def test_torch_code_is_compared_with_the_device(tmp_path, capability, built_for, status):
    machine = Machine(tmp_path, torch=cuda_torch((capability,), built_for=built_for))
    assert one(accelerator.check_devices(machine), "torch code").status == status


@pytest.mark.parametrize(("name", "status"), [("Ascend950DT_2", "pass"), ("Ascend910B4", "fail")])
def test_ascend_devices_are_told_apart_by_their_name(tmp_path, name, status):
    machine = Machine(tmp_path, modules=["torch_npu"], torch=npu_torch(name, 8, 135))
    expect(accelerator.check_devices(machine), "device", "pass", f"8 x {name}")
    findings = accelerator.check_profile_hardware(machine, profile("decode-ep64-ascend950"))
    expect(findings, "profile hardware", status)


def test_mixed_devices_fail(tmp_path):
    machine = Machine(tmp_path, torch=cuda_torch(((9, 0), (10, 0))))
    expect(accelerator.check_devices(machine), "device mix", "fail", "sm100+sm90")


def test_profile_for_another_machine_fails(tmp_path):
    cpu = Machine(tmp_path)
    expect(accelerator.check_profile_hardware(cpu, profile("cpu-nano")), "profile hardware", "pass")
    expect(accelerator.check_profile_hardware(cpu, profile("h200x8")), "profile hardware", "fail",
           "the profile is for sm90, this machine has cpu", "emulates it")  # fmt: skip
    near = Machine(tmp_path, torch=cuda_torch(((10, 3),) * 4))
    expect(accelerator.check_profile_hardware(near, profile("prefill-ep4")), "profile hardware", "fail",
           "sm100, this machine has sm103; kernels built for one do not load on the other")  # fmt: skip


def test_profile_with_too_few_devices_or_too_little_memory_fails(tmp_path):
    small = Machine(tmp_path, torch=cuda_torch(((9, 0),) * 4))
    expect(
        accelerator.check_profile_hardware(small, profile("h200x8")),
        "profile hardware",
        "fail",
        "8 devices per host, 4",
    )
    tight = Machine(tmp_path, torch=cuda_torch(((9, 0),) * 8, memory_gib=79.2))
    expect(accelerator.check_profile_hardware(tight, profile("h200x8")), "profile hardware", "fail",
           "139 GiB per device, the smallest has 79.2", "--set hardware.hbm_gib=79")  # fmt: skip
    good = Machine(tmp_path, torch=cuda_torch(((9, 0),) * 8))
    expect(accelerator.check_profile_hardware(good, profile("h200x8")), "profile hardware", "pass", "8 x sm90")


DRIVERS = {
    "570.86.15": "NVRM version: NVIDIA UNIX x86_64 Kernel Module  570.86.15  Thu Jan 23 04:13:51 UTC 2025\n",
    "580.65.06": "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build  (x)\n",
}


@pytest.mark.parametrize("version", DRIVERS)
def test_driver_version_is_read_in_both_forms(tmp_path, version):
    machine = Machine(tmp_path, files={"/proc/driver/nvidia/version": DRIVERS[version]}, torch=cuda_torch())
    findings = accelerator.check_driver(machine, profile("h200x8", 'requires.driver_min="575"'))
    expect(findings, "driver", "pass" if version.startswith("580") else "fail", version)
    expect(findings, "CUDA", "pass", "13.0")


def test_versions_below_the_profiles_fail_and_absent_ones_too(tmp_path):
    old = Machine(tmp_path, torch=cuda_torch(cuda="12.8"))
    expect(accelerator.check_driver(old, profile("prefill-ep8")), "CUDA", "fail", "12.8; the profile needs 13.0")
    expect(
        accelerator.check_driver(Machine(tmp_path), profile("prefill-ep8")),
        "CUDA",
        "fail",
        "torch is built without CUDA",
    )
    findings = accelerator.check_driver(Machine(tmp_path), profile("prefill-ep8-ascend950"))
    expect(findings, "CANN", "fail", "no CANN toolkit is installed; the profile needs 9.2", "install CANN 9.2")
    assert accelerator.check_driver(Machine(tmp_path), None) == []


@pytest.mark.parametrize(("text", "status"), [("version=9.2.0", "pass"), ("Version=8.5.RC1", "fail")])
def test_cann_version_comes_from_its_home(tmp_path, text, status):
    files = {"/opt/cann/compiler/version.info": text}
    machine = Machine(tmp_path, environ={"ASCEND_HOME_PATH": "/opt/cann"}, files=files)
    expect(accelerator.check_driver(machine, profile("prefill-ep8-ascend950")), "CANN", status)


@pytest.mark.parametrize(
    ("version", "status"), [("2.10.1", "warn"), ("2.11.0", "pass"), ("2.13.0+cu130", "pass"), ("2.15.0", "warn")]
)
def test_torch_outside_the_tested_range_warns(tmp_path, version, status):
    expect(accelerator.check_torch(Machine(tmp_path, torch=cpu_torch(version))), "torch", status, version)


# ------------------------------------------------------------------ libraries

MAPS = """\
7f00-7f10 r-xp 00000000 08:01 11  /site/nvidia/nccl/lib/libnccl.so.2
7f10-7f20 rw-p 00000000 08:01 11  /site/nvidia/nccl/lib/libnccl.so.2
7f20-7f30 r-xp 00000000 08:01 12  /usr/lib/libnvshmem_host.so.3
7f30-7f40 r-xp 00000000 08:01 13  /usr/lib/libnccl-net.so
"""


def test_the_mapped_nccl_is_reported_and_compared(tmp_path):
    machine = Machine(tmp_path, files={"/proc/self/maps": MAPS}, torch=cuda_torch())
    findings = libraries.check_mapped(machine, profile("prefill-ep8"), version_of_nccl=lambda path: "2.32.3")
    expect(findings, "NCCL", "pass", "2.32.3, mapped from /site/nvidia/nccl/lib/libnccl.so.2")
    expect(findings, "NVSHMEM", "pass", "/usr/lib/libnvshmem_host.so.3")
    findings = libraries.check_mapped(machine, profile("prefill-ep8"), version_of_nccl=lambda path: "2.29.1")
    expect(findings, "NCCL", "fail", "2.29.1", "needs 2.32.3 or newer", "nvidia-nccl-cu13>=2.32.3")


def test_two_files_of_one_library_fail(tmp_path):
    maps = MAPS + "7f50-7f60 r-xp 00000000 08:01 14  /usr/lib/libnccl.so.2.27.5\n"
    machine = Machine(tmp_path, files={"/proc/self/maps": maps}, torch=cuda_torch())
    findings = libraries.check_mapped(machine, None, version_of_nccl=lambda path: "2.32.3")
    expect(findings, "NCCL", "fail", "2 files are mapped", "/usr/lib/libnccl.so.2.27.5")


def test_nothing_mapped_passes_unless_the_profile_needs_it(tmp_path):
    machine = Machine(tmp_path, files={"/proc/self/maps": "7f00-7f10 r-xp 0 08:01 1  /usr/lib/libc.so.6\n"})
    expect(libraries.check_mapped(machine, None), "collectives", "pass", "none is mapped")
    expect(libraries.check_mapped(machine, profile("prefill-ep8")), "NCCL", "fail", "none is mapped")


@pytest.mark.skipif(shutil.which("gcc") is None, reason="needs gcc to build a look-alike library")
def test_nccl_version_number_is_decoded_from_the_library_itself(tmp_path):
    source = tmp_path / "fake.c"
    source.write_text("int ncclGetVersion(int *v) { *v = 23203; return 0; }\n")
    library = tmp_path / "libnccl.so.2"
    import subprocess

    subprocess.run(["gcc", "-shared", "-fPIC", "-o", str(library), str(source)], check=True, timeout=60)
    assert libraries.nccl_version(str(library)) == "2.32.3"


# ------------------------------------------------------------------ toolchain


def test_cpu_needs_a_compiler_only(tmp_path):
    machine = Machine(tmp_path, tools={"g++": "g++ (Debian) 12.2.0\n"})
    (finding,) = toolchain.check_tools(machine, "cpu")
    assert (finding.name, finding.status, finding.found) == ("C++ compiler", "pass", "/usr/bin/g++ 12.2.0")
    expect(
        toolchain.check_tools(Machine(tmp_path), "cpu"), "C++ compiler", "warn", "g++ is not on PATH", "apt install g++"
    )
    old = Machine(tmp_path, tools={"g++": "g++ 9.4.0\n"})
    expect(toolchain.check_tools(old, "cpu"), "C++ compiler", "warn", "C++20 needs 11")
    named = Machine(tmp_path, environ={"CXX": "clang++"}, tools={"clang++": "clang version 17.0.6\n"})
    expect(toolchain.check_tools(named, "cpu"), "C++ compiler", "pass", "/usr/bin/clang++ 17.0.6")


def test_cuda_tools_are_each_reported(tmp_path):
    findings = toolchain.check_tools(Machine(tmp_path), "sm90")
    for name in ("nvcc", "triton", "tilelang", "cuobjdump", "nvdisasm"):
        assert one(findings, name).status == "warn"
    machine = Machine(
        tmp_path,
        tools={"g++": "g++ 13.2.0", "nvcc": "Cuda compilation tools, release 13.0, V13.0.48", "cuobjdump": "x",
               "nvdisasm": "x"},
        installed=[distribution("triton", "3.7.0"), distribution("tilelang", "0.1.15"),
                   distribution("apache-tvm-ffi", "0.1.12")],
    )  # fmt: skip
    assert {f.status for f in toolchain.check_tools(machine, "sm90")} == {"pass"}


def test_an_nvcc_that_tilelang_would_not_find_does_not_pass(tmp_path):
    tools = {"nvcc": "Cuda compilation tools, release 13.0, V13.0.48"}
    machine = Machine(tmp_path, environ={"CUDA_HOME": str(tmp_path / "absent")}, tools=tools)
    found = f"there is no nvcc in CUDA_HOME ({tmp_path / 'absent'}/bin)"
    expect(toolchain.check_tools(machine, "sm90"), "nvcc", "warn", found, "unset CUDA_HOME")


def test_the_nvcc_of_a_package_is_asked_for_its_version(tmp_path, monkeypatch):
    package = [distribution("nvidia-cuda-nvcc", "13.0.48")]
    for release, status in (("13.0", "pass"), ("12.4", "warn")):
        machine = Machine(tmp_path, tools={"nvcc": f"tools, release {release}, V"}, installed=package)
        monkeypatch.setattr(machine, "which", lambda tool: None)
        assert one(toolchain.check_tools(machine, "sm90"), "nvcc").status == status


def test_tools_of_wrong_versions_warn(tmp_path):
    machine = Machine(
        tmp_path,
        tools={"nvcc": "Cuda compilation tools, release 12.4, V12.4.131"},
        installed=[distribution("triton", "3.1.0"), distribution("tilelang", "0.1.15"),
                   distribution("apache-tvm-ffi", "0.1.15.post2")],
    )  # fmt: skip
    findings = toolchain.check_tools(machine, "sm100")
    expect(findings, "nvcc", "warn", "12.4, sm_100 needs 12.9")
    expect(findings, "triton", "warn", "3.1.0, 3.6 or newer")
    expect(
        findings, "tilelang", "warn", "apache-tvm-ffi 0.1.15.post2, which is too new", "apache-tvm-ffi>=0.1.11,<0.1.13"
    )


def test_ascend_needs_bisheng(tmp_path):
    expect(toolchain.check_tools(Machine(tmp_path), "ascend950"), "bisheng", "warn", "not on PATH", "set_env.sh")


# --------------------------------------------------------------------- vendor


@pytest.mark.parametrize(
    ("name", "version"), [("deep-ep", "1.0.0"), ("deep-gemm", "1.0.0"), ("flash-mla", "1.0.0.dev0")]
)
def test_placeholder_from_the_index_fails(tmp_path, name, version):
    machine = Machine(tmp_path, installed=[distribution(name, version)])
    expect(vendor.check_names(machine), "package names", "fail", f"{name} {version}", f"pip uninstall {name}")


def test_vendor_build_of_the_same_name_is_no_placeholder(tmp_path):
    own = [distribution("deep-gemm", "2.6.1+c491439"), distribution("flash-mla", "1.0.0.dev0", from_index=False)]
    expect(vendor.check_names(Machine(tmp_path, installed=own)), "package names", "pass")


def test_repackaged_copy_warns(tmp_path):
    machine = Machine(tmp_path, installed=[distribution("deepinfer-gemm", "2.8.2")])
    expect(vendor.check_names(machine), "package names", "warn", "copy of deep_gemm by an unknown uploader")


def test_vendor_library_is_judged_by_its_functions(tmp_path):
    def probe(found):
        machine = Machine(tmp_path, modules=["deep_gemm"], attributes={"deep_gemm": found}, torch=cuda_torch())
        return one(vendor.check_capabilities(machine, None, "sm90"), "deep_gemm")

    every = tuple(c.function for c in LIBRARIES["deep_gemm"].capabilities)
    assert probe(every).status == "pass"
    part = probe(("fp8_fp4_gemm_nt",))
    assert part.status == "warn" and "lacks BF16 products, grouped BF16 experts" in part.found
    none = probe(())
    assert none.status == "fail" and "not the library of this name" in none.found
    broken = probe("ImportError: libcudart.so.12: cannot open shared object file")
    assert broken.status == "warn" and "libcudart.so.12" in broken.found


def test_vendor_library_is_not_imported_without_an_accelerator(tmp_path):
    machine = Machine(tmp_path, modules=["deep_gemm"])  # asking for its attributes would be a KeyError
    findings = vendor.check_capabilities(machine, None, "cpu")
    expect(findings, "deep_gemm", "pass", "not loaded")
    expect(findings, "vendor libraries", "pass", "flash_mla, deep_ep, deep_select")


def test_operations_that_a_vendor_could_compute_are_listed_as_unverified(tmp_path):
    (absent,) = vendor.check_capabilities(Machine(tmp_path), None, "sm100")
    lines = [line for line in absent.details if line.startswith("deep_gemm, when kernels.overrides names it")]
    assert any("linear (reference)" in line and "unverified" in line for line in lines)
    (hopper,) = vendor.check_capabilities(Machine(tmp_path), None, "sm90")
    assert not any("linear (reference)" in line for line in hopper.details)


def test_attributes_are_found_in_a_child_process(tmp_path, monkeypatch):
    (tmp_path / "good_module.py").write_text("fast = 1\nprint('chatter')\n")
    (tmp_path / "crashing_module.py").write_text("raise OSError('no driver')\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert System().attributes("good_module", ("fast", "slow")) == (["fast"], None)
    assert System().attributes("crashing_module", ("fast",)) == ([], "OSError: no driver")


# -------------------------------------------------------------------- kernels


def test_operations_list_choices_and_passed_over_candidates():
    from deepinfer_kernels.ops import OPS

    (finding,) = implementations.check_implementations(None, "cpu")
    assert finding.status == "pass" and finding.found.startswith(f"{len(OPS)} on cpu in fast numerics")
    listed = " ".join(line.partition(": ")[2] for line in finding.details)
    assert all(op in listed for op in OPS)
    for line in finding.details:
        ops = line.partition(": ")[2].split(", ")
        assert len(ops) == len(set(ops)), line
    elsewhere = [line for line in finding.details if "triton" in line]
    assert len(elsewhere) == 1 and re.fullmatch(r"not for cpu: triton \(\d+\), tilelang \(3\)", elsewhere[0])
    (finding,) = implementations.check_implementations(profile("cpu-nano", "numerics.mode=reference"), "cpu")
    assert "not torch (honours fast numerics, not reference): moe_experts" in finding.details


def test_of_two_gpu_kernels_the_order_is_said(monkeypatch):
    from deepinfer_kernels import registry

    def usable(implementation, mode, platform, **_):
        here = platform in implementation.platforms and implementation.auto
        return None if here else f"not on {platform}"

    monkeypatch.setattr(registry, "why_not", usable)
    for platform in ("sm90", "sm100"):
        (finding,) = implementations.check_implementations(None, platform)
        order = [d for d in finding.details if "unless kernels.overrides says otherwise" in d]
        assert any("attend_cached" in line for line in order)
        assert not any(f"not on {platform}" in line and "attend_cached" in line for line in finding.details)


def test_unbuilt_kernels_cost_speed_and_name_the_command(tmp_path):
    empty = profile("cpu-nano", f"kernels.cache_dir={tmp_path}")
    (finding,) = implementations.check_compiled(empty, "cpu")
    assert finding.status == "warn" and finding.fix == "deepinfer build-kernels --target cpu"
    (listed,) = implementations.check_implementations(empty, "cpu")
    assert listed.status == "pass"
    assert any(d.startswith("not cpu (not built for this machine: deepinfer build-kernels") for d in listed.details)
    assert implementations.check_compiled(None, "sm90") == []
    (held,) = implementations.check_implementations(
        profile("cpu-nano", f"kernels.cache_dir={tmp_path}", "kernels.backend=cpu"), "cpu"
    )
    assert held.status == "fail" and "not built for this machine" in held.found


def test_operation_without_an_implementation_fails_with_the_reasons():
    (finding,) = implementations.check_implementations(None, "ascend950")
    assert finding.status == "fail" and "not on ascend950" in finding.found
    (finding,) = implementations.check_implementations(
        profile("h200x1-nano", "kernels.overrides.embed=deep_gemm"), "sm90"
    )
    assert finding.status == "fail" and "no backend 'deep_gemm'" in finding.found
    with pytest.raises(ProfileError, match="there is no operation atend_cached; did you mean attend_cached"):
        profile("cpu-nano", "kernels.overrides.atend_cached=cpu")


def test_ascend_operations_are_listed_with_what_is_known_of_them():
    assert implementations.check_ascend(None, "sm90") == []
    for asked in ((None, "ascend950"), (profile("decode-ep64-ascend950"), "cpu")):
        (finding,) = implementations.check_ascend(*asked)
        assert finding.status == "warn" and "no step runs on an NPU" in finding.found
        known, without = finding.details
        assert "binary and numerics unverified: rms_norm" in known and "reference through torch_npu" in without
        assert "next_tokens" in without and "attend_cached" in known


def test_kernel_cache_must_be_a_writable_folder(tmp_path):
    environ = {"XDG_CACHE_HOME": str(tmp_path)}
    machine = Machine(tmp_path, environ=environ)
    expect(implementations.check_cache(machine, None), "kernel cache", "pass", "deepinfer/kernels: empty")
    (tmp_path / "deepinfer" / "kernels").mkdir(parents=True)
    (tmp_path / "deepinfer" / "kernels" / "a.so").write_text("x")
    expect(implementations.check_cache(machine, None), "kernel cache", "pass", "1 files")
    file = tmp_path / "file"
    file.write_text("")
    chosen = profile("cpu-nano", f"kernels.cache_dir={file}/cache")
    expect(implementations.check_cache(machine, chosen), "kernel cache", "fail", "is not a folder", "kernels.cache_dir")
    full = Machine(tmp_path, environ=environ, free=2**29)
    expect(implementations.check_cache(full, None), "kernel cache", "warn", "0.5 GiB free")


def test_unwritable_kernel_cache_fails(tmp_path, monkeypatch):
    monkeypatch.setattr(implementations.os, "access", lambda *a: False)
    machine = Machine(tmp_path, environ={"XDG_CACHE_HOME": str(tmp_path)})
    expect(implementations.check_cache(machine, None), "kernel cache", "fail", "is not writable")


# -------------------------------------------------------------------- storage


def test_disk_too_small_for_the_release_warns(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    machine = Machine(tmp_path, free=200 * machines.GIB)
    finding = expect(storage.check_disk(machine), "disk", "warn", "200 of 400 GiB free", "475 GiB", "--dest FOLDER")
    assert finding.found.startswith(str(tmp_path))
    expect(storage.check_disk(Machine(tmp_path)), "disk", "pass")


MEMINFO = "MemTotal:       67108864 kB\nMemAvailable:   33554432 kB\n"
LIMITS = "Limit            Soft Limit   Hard Limit   Units\nMax open files   {}           20000        files\n"


def test_host_tiers_must_fit_the_memory(tmp_path):
    files = {"/proc/meminfo": MEMINFO, "/proc/self/limits": LIMITS.format(8192)}
    machine = Machine(tmp_path, files=files)
    expect(storage.check_memory(machine, profile("h200x8")), "host memory", "pass", "64 GiB, 32 GiB available")
    big = profile("h200x8", "cache.host_gib_per_rank=100.0")
    expect(
        storage.check_memory(machine, big), "host memory", "fail", "host tiers need 808 GiB", "cache.host_gib_per_rank"
    )
    caged = Machine(tmp_path, files={**files, "/sys/fs/cgroup/memory.max": str(4 * machines.GIB)})
    expect(storage.check_memory(caged, profile("h200x8")), "host memory", "fail", "may use 4 GiB")


@pytest.mark.parametrize(("limit", "status"), [("1024", "warn"), ("65536", "pass"), ("unlimited", "pass")])
def test_open_files_limit(tmp_path, limit, status):
    files = {"/proc/meminfo": MEMINFO, "/proc/self/limits": LIMITS.format(limit)}
    expect(storage.check_memory(Machine(tmp_path, files=files), None), "open files", status, limit)


def test_small_shared_memory_fails_with_several_ranks_and_warns_with_one(tmp_path):
    (tmp_path / "dev" / "shm").mkdir(parents=True)
    small = Machine(tmp_path, free=64 * 2**20)
    expect(storage.check_shared_memory(small, profile("h200x8")), "shared memory", "fail", "8 ranks", "--shm-size")
    expect(storage.check_shared_memory(small, profile("cpu-nano")), "shared memory", "warn")
    expect(storage.check_shared_memory(Machine(tmp_path), profile("h200x8")), "shared memory", "pass")
    expect(storage.check_shared_memory(Machine(tmp_path / "none"), None), "shared memory", "warn", "absent")


def test_weights_that_are_not_a_checkpoint_fail(tmp_path):
    (tmp_path / "config.json").write_text("<!doctype html>")
    expect(storage.check_weights(tmp_path), "weights", "fail", "config.json")
    expect(storage.check_weights(tmp_path / "absent"), "weights", "fail", "not a directory")


def fetched(folder, *, stamped=("a.bin", "b.bin"), listed=("a.bin", "b.bin", "c.bin")):
    """A folder that a fetch filled: every listed file but the last exists, the stamped ones were checked."""
    import hashlib

    from deepinfer_engine.weights.fetch.files import RemoteFile, hash_bytes
    from deepinfer_engine.weights.fetch.manifest import Manifest, manifest_path

    remote = [RemoteFile(name, 4, "sha256:" + hashlib.sha256(name[:1].encode() * 4).hexdigest()) for name in listed]
    manifest = Manifest("org/model", "main", "c" * 40, tuple(remote))
    for name in listed[:-1]:
        (folder / name).write_bytes(name[:1].encode() * 4)
        if name in stamped:
            manifest.stamp(name, folder / name, hash_bytes((folder / name).read_bytes()))
    manifest_path(folder).parent.mkdir()
    manifest.save(folder)


def test_manifest_of_a_fetch_tells_whether_files_are_as_they_were(tmp_path):
    expect(storage.check_manifest(tmp_path), "weights manifest", "pass", "no fetch is remembered")
    fetched(tmp_path)
    expect(storage.check_manifest(tmp_path), "weights manifest", "pass", "org/model at cccccccccccc: 2 files")
    (tmp_path / "b.bin").write_bytes(b"other")
    finding = expect(
        storage.check_manifest(tmp_path), "weights manifest", "fail", "1 changed since", "--verify --repair"
    )
    assert finding.details == ("b.bin",)


def test_files_that_were_never_hashed_warn(tmp_path):
    fetched(tmp_path, stamped=("a.bin",))
    expect(storage.check_manifest(tmp_path), "weights manifest", "warn", "1 never checked", "--verify", "b.bin")


def test_broken_manifest_is_a_failed_check(tmp_path):
    (tmp_path / ".fetch").mkdir()
    (tmp_path / ".fetch" / "manifest.json").write_text('{"schema": "other"}')
    found = diagnose(model=tmp_path, system=Machine(tmp_path / "machine"))
    finding = one([f for _, f in found.findings], "weights manifest")
    assert finding.status == "fail" and "not a manifest of a fetch" in finding.found


def test_missing_embedded_model_warns(monkeypatch):
    from deepinfer_engine.config import resources
    from deepinfer_engine.errors import NotReadyError

    def absent(name):
        raise NotReadyError("the embedded model is not here", hint="give --model DIR")

    monkeypatch.setattr(resources, "model_dir", absent)
    expect(storage.check_weights(None), "embedded model", "warn", "is not here", "--model DIR")


# -------------------------------------------------------------------- network


def net(name, *addresses, speed=None):
    return network.Interface(name, tuple(addresses), speed)


LO = net("lo", "127.0.0.1", "::1")


def test_the_fastest_routable_interface_is_chosen():
    found = [LO, net("eth0", "10.0.0.5", speed=1000), net("ib0", "10.1.0.5", speed=400_000), net("usb0", "169.254.3.1")]
    chosen = network.choose(found, None)
    assert isinstance(chosen, network.Interface) and chosen.name == "ib0"


@pytest.mark.parametrize("address", ["169.254.3.1", "fe80::1"])
def test_link_local_is_refused(address):
    assert network.choose([LO, net("eth9", address)], None) == (
        f"eth9 has {address}: link-local and loopback addresses reach no other host"
    )


def test_pattern_without_a_match_names_what_there_is():
    assert (
        network.choose([LO, net("eth0", "10.0.0.5")], "ib*")
        == "no interface that is up matches 'ib*'; there are: lo, eth0"
    )
    assert network.choose([LO], None) == "only lo is up"


def test_interface_is_required_by_a_pattern_or_by_several_hosts(tmp_path):
    machine = Machine(tmp_path, files={"/sys/class/net/lo/operstate": "unknown\n"})
    expect(network.check_interfaces(machine, None), "interface", "warn", "only lo is up")
    expect(network.check_interfaces(machine, profile("decode-ep64")), "interface", "fail", "16 hosts need one")
    named = profile("h200x8", "network.interface=ib*")
    expect(network.check_interfaces(machine, named), "interface", "fail", "matches 'ib*'", "network.interface")


def test_interface_that_is_down_is_not_counted(tmp_path):
    files = {
        "/sys/class/net/lo/operstate": "unknown\n",
        "/sys/class/net/eth0/operstate": "down\n",
        "/proc/net/if_inet6": "fe800000000000000000000000000001 02 40 20 80 eth1\n",
        "/sys/class/net/eth1/operstate": "up\n",
        "/sys/class/net/eth1/speed": "25000\n",
    }
    found = network.interfaces(Machine(tmp_path, files=files))
    assert [i.name for i in found] == ["eth1", "lo"]
    assert (found[0].addresses, found[0].usable, found[0].speed_mbit) == (("fe80::1",), (), 25_000)


def test_collective_variable_must_name_a_working_interface(tmp_path):
    machine = Machine(tmp_path, environ={"NCCL_SOCKET_IFNAME": "eth7", "GLOO_SOCKET_IFNAME": "lo"})
    findings = network._named_by_environment(machine, [LO, net("eth0", "10.0.0.5")])
    assert [f.found for f in findings] == ["NCCL_SOCKET_IFNAME names eth7, which has no usable address or is not up"]


def test_echo_returns_what_was_sent_and_says_why_not():
    assert network.echo("127.0.0.1") is None
    assert "ssign" in str(network.echo("203.0.113.9"))  # cannot assign requested address


# ------------------------------------------------------------------- packages


def test_upstream_engine_and_foreign_command_are_named(tmp_path):
    machine = Machine(
        tmp_path,
        installed=[distribution("deepinfer", "0.1.0"), distribution("other-tool", "3", scripts=["deepinfer"])],
        owners={"deepinfer_engine": ["deepinfer-cli", "deepinfer-fork"]},
    )
    findings = packages.check_conflicts(machine)
    expect(findings, "deepinfer", "warn", "upstream engine deepinfer 0.1.0", "pip uninstall deepinfer")
    expect(findings, "deepinfer command", "fail", "other-tool 3 installs a command called deepinfer")
    expect(findings, "packages", "fail", "deepinfer_engine is installed by deepinfer-cli, deepinfer-fork")
    ours = Machine(tmp_path, installed=[distribution("deepinfer-cli", "0.1.0", scripts=["deepinfer"])])
    expect(packages.check_conflicts(ours), "conflicts", "pass")


def test_requirements_are_compared_with_what_is_installed(tmp_path):
    wanted = ["numpy<3,>=2.4", "PyYAML>=6.0.2", "huggingface_hub<3,>=2.4", 'triton>=3.6; extra == "cuda"']
    installed = [distribution("numpy", "1.26.4"), distribution("pyyaml", "6.0.4")]
    found = packages.check_requirements(Machine(tmp_path, installed=installed, requirements=wanted))
    finding = expect(found, "requirements", "fail", "2 not satisfied")
    assert finding.details == (
        "numpy 1.26.4 does not satisfy <3,>=2.4",
        "huggingface-hub is not installed, <3,>=2.4 is needed",
    )
    good = [distribution("numpy", "2.4.6"), distribution("pyyaml", "6.0.4"), distribution("huggingface-hub", "2.4.0")]
    expect(packages.check_requirements(Machine(tmp_path, installed=good, requirements=wanted)), "requirements", "pass")
    expect(packages.check_requirements(Machine(tmp_path)), "requirements", "pass", "source tree")


def test_our_own_requirements_have_a_form_that_is_understood():
    import tomllib

    root = Path(__file__).resolve().parents[3]
    for text in tomllib.loads((root / "pyproject.toml").read_text())["project"]["dependencies"]:
        spec = text.lstrip("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ-_0123456789")
        packages.satisfies("1.0", spec)  # asserts the form


@pytest.mark.parametrize(
    ("version", "spec", "good"),
    [("2.4.6", ">=2.4,<3", True), ("3.0", ">=2.4,<3", False), ("2.4", ">=2.4.0", True), ("2.13.0+cpu", "<2.15", True),
     ("0.1.15", "==0.1.15", True), ("1.0", "", True), ("2", ">2", False), ("2", "<=2.0", True)],
)  # fmt: skip
def test_satisfies(version, spec, good):
    assert packages.satisfies(version, spec) is good


def test_versions_compare_by_their_numbers():
    assert version_tuple("2.13.0+cu130") == (2, 13, 0)
    assert version_tuple("none") == ()
    assert at_least("13.0", "13") and at_least("2.32.3", "2.32.3") and not at_least("2.9", "2.32.3")


def test_real_machine_is_read_without_a_failure_of_the_checks_themselves():
    text = "\n".join(f.found for _, f in diagnose().findings)
    assert "the check itself failed" not in text


def test_profile_from_text_is_checked_like_a_shipped_one(tmp_path):
    p = load_profile_text("schema_version: 1\nname: mine\n", where="mine").profile
    expect(accelerator.check_profile_hardware(Machine(tmp_path), p), "profile hardware", "pass")


@pytest.mark.parametrize(
    ("name", "overlap", "platform", "says"),
    [
        ("cpu-nano", "false", "cpu", "plain: a step is finished"),
        ("cpu-nano", "true", "cpu", "plain in one process"),
        ("h200x1-nano", "true", "sm90", "pipelined: "),
    ],
)
def test_step_loop_is_the_one_that_runs(name: str, overlap: str, platform: str, says: str):
    (finding,) = implementations.check_step_loop(profile(name, f"sched.overlap={overlap}"), platform)
    assert finding.status == "pass" and finding.found.startswith(says)
