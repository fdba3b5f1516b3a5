"""Network interfaces that ranks may talk over. A link-local address reaches nobody outside its cable: refused."""

from __future__ import annotations

import fnmatch
import ipaddress
import re
import socket
import struct
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from deepinfer_engine.doctor.finding import Finding, failed, passed, warned
from deepinfer_engine.doctor.system import System

if TYPE_CHECKING:
    from deepinfer_engine.config.schema import Profile

#: Linux request number that returns the IPv4 address of an interface.
_SIOCGIFADDR = 0x8915
#: What the echo sends: enough for many packets, little enough to be instant.
_ECHO_BYTES = 1 << 20
_ECHO_SECONDS = 5.0


@dataclass(frozen=True)
class Interface:
    """A network interface that is up, with its addresses."""

    name: str
    addresses: tuple[str, ...]
    speed_mbit: int | None

    @property
    def usable(self) -> tuple[str, ...]:
        """Addresses that another host can reach: neither loopback nor link-local."""
        parsed = [ipaddress.ip_address(a) for a in self.addresses]
        return tuple(str(a) for a in parsed if not (a.is_link_local or a.is_loopback or a.is_unspecified))

    @property
    def loopback(self) -> bool:
        return any(ipaddress.ip_address(a).is_loopback for a in self.addresses)


def interfaces(system: System) -> list[Interface]:
    """Every interface that is up, in the order of names."""
    out = []
    ipv6 = _ipv6_addresses(system)
    for name in system.names("/sys/class/net"):
        state = (system.read(f"/sys/class/net/{name}/operstate") or "").strip()
        if state not in ("up", "unknown"):  # loopback and tunnels say unknown
            continue
        speed = (system.read(f"/sys/class/net/{name}/speed") or "").strip()
        v4 = ipv4_address(name)
        addresses = (*((v4,) if v4 else ()), *ipv6.get(name, ()))
        out.append(Interface(name, addresses, int(speed) if speed.isdigit() else None))
    return out


def ipv4_address(name: str) -> str | None:
    """The first IPv4 address of an interface, None when it has none."""
    import fcntl

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
        except OSError:
            return None
    return socket.inet_ntoa(answer[20:24])


def _ipv6_addresses(system: System) -> dict[str, list[str]]:
    out: dict[str, list[str]] = {}
    for line in (system.read("/proc/net/if_inet6") or "").splitlines():
        fields = line.split()
        if len(fields) == 6 and re.fullmatch(r"[0-9a-f]{32}", fields[0]):
            out.setdefault(fields[5], []).append(str(ipaddress.IPv6Address(int(fields[0], 16))))
    return out


def choose(found: Sequence[Interface], pattern: str | None) -> Interface | str:
    """The interface that ranks would use, or the sentence that says why there is none."""
    wanted = (
        [i for i in found if fnmatch.fnmatchcase(i.name, pattern)] if pattern else [i for i in found if not i.loopback]
    )
    if not wanted:
        names = ", ".join(i.name for i in found) or "none"
        return f"no interface that is up matches {pattern!r}; there are: {names}" if pattern else f"only {names} is up"
    good = [i for i in wanted if i.usable]
    if not good:
        shown = "; ".join(f"{i.name} has {', '.join(i.addresses) or 'no address'}" for i in wanted)
        return f"{shown}: link-local and loopback addresses reach no other host"
    # the fastest, then the first by name: a management port must not win over a data port
    return min(good, key=lambda i: (-(i.speed_mbit or 0), i.name))


def echo(address: str) -> str | None:
    """Send a mebibyte to ourselves over an address; None when it comes back whole, else the reason."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        with socket.create_server((address, 0), family=family) as server:
            server.settimeout(_ECHO_SECONDS)
            worker = threading.Thread(target=_answer, args=(server,), daemon=True)
            worker.start()
            payload = bytes(range(256)) * (_ECHO_BYTES // 256)
            with socket.create_connection(server.getsockname()[:2], timeout=_ECHO_SECONDS) as client:
                sender = threading.Thread(target=client.sendall, args=(payload,), daemon=True)
                sender.start()
                back = bytearray()
                while len(back) < len(payload) and (part := client.recv(1 << 16)):
                    back += part
                sender.join(_ECHO_SECONDS)
            worker.join(_ECHO_SECONDS)
    except OSError as exc:
        return str(exc)
    return None if bytes(back) == payload else f"{len(back)} of {len(payload)} bytes came back as sent"


def _answer(server: socket.socket) -> None:
    try:
        peer, _ = server.accept()
    except OSError:
        return  # nobody came; the caller's connect has failed and says why
    with peer:
        left = _ECHO_BYTES
        while left and (part := peer.recv(1 << 16)):
            peer.sendall(part)
            left -= len(part)


def check_interfaces(system: System, profile: Profile | None) -> Sequence[Finding]:
    """The interface that ranks of several hosts would use, and an echo over it."""
    found = interfaces(system)
    pattern = profile.network.interface if profile is not None else None
    hosts = 1
    if profile is not None and profile.hardware.gpus_per_node:
        hosts = -(-profile.hardware.gpus // profile.hardware.gpus_per_node)
    chosen = choose(found, pattern)
    findings: list[Finding] = []
    if isinstance(chosen, str):
        fix = "bring an interface up with a routable address, or set network.interface to its name"
        needed = hosts > 1 or pattern is not None
        text = f"{chosen}; {hosts} hosts need one" if hosts > 1 else chosen
        findings.append(failed("interface", text, fix) if needed else warned("interface", text, fix))
    else:
        address = chosen.usable[0]
        speed = f", {chosen.speed_mbit / 1000:g} Gbit/s" if chosen.speed_mbit else ""
        reason = echo(address)
        if reason is None:
            findings.append(passed("interface", f"{chosen.name} {address}{speed}; an echo of 1 MiB came back"))
        else:
            fix = "check the firewall and the address of the interface"
            findings.append(failed("interface", f"{chosen.name} {address}{speed}: echo failed, {reason}", fix))
    return [*findings, *_named_by_environment(system, found)]


def _named_by_environment(system: System, found: Sequence[Interface]) -> list[Finding]:
    """The collectives' own variables must not name an interface that cannot work."""
    out = []
    for variable in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):
        value = system.environ.get(variable)
        if not value or value.startswith("^"):
            continue
        for name in value.removeprefix("=").split(","):
            matching = [i for i in found if i.name.startswith(name)]
            if not any(i.usable or i.loopback for i in matching):
                text = f"{variable} names {name}, which has no usable address or is not up"
                out.append(failed("interface", text, f"unset {variable}, or name one that is up"))
    return out
