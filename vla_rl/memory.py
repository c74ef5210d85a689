"""Memory of the machine."""

from __future__ import annotations

from pathlib import Path


def host_memory() -> tuple[int, int]:
    """[bytes] Free, and in all. FileNotFoundError where the system does not tell."""
    lines = Path("/proc/meminfo").read_text(encoding="utf-8").splitlines()
    sizes = {name: int(rest.split()[0]) * 1024 for name, rest in (line.split(":") for line in lines)}
    return sizes["MemAvailable"], sizes["MemTotal"]
