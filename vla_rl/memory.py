"""Memory of the machine, or of the container or batch job that this process is in."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

# Of a control group: its limit, what is used of it, and how memory.stat begins the names of sums with the groups below.
VERSION_2 = ("memory.max", "memory.current", "")
VERSION_1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_")


def host_memory() -> tuple[int, int]:
    """[bytes] Free, and in all, of the machine or, where that is less, of a control group that this process is in.

    FileNotFoundError where the system does not tell.
    """
    lines = Path("/proc/meminfo").read_text(encoding="utf-8").splitlines()
    sizes = {name: int(rest.split()[0]) * 1024 for name, rest in (line.split(":") for line in lines)}
    found = [(sizes["MemAvailable"], sizes["MemTotal"]), *group_memory(Path("/proc/self/cgroup"))]
    return max(0, min(free for free, _ in found)), min(total for _, total in found)


def group_memory(own: Path, root: Path = Path("/sys/fs/cgroup")) -> Iterator[tuple[int, int]]:
    """[bytes] Free and in all, of every control group with a limit that is listed in ``own``, and of those above it.

    A container may be told the path that its group has outside, while ``root`` shows nothing above the group itself.
    """
    for line in own.read_text(encoding="utf-8").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        top, names = (root / "memory", VERSION_1) if controllers else (root, VERSION_2)
        group = top / path.lstrip("/")
        for folder in (group, *group.parents):
            if folder.is_relative_to(top):
                yield from _limited(folder, *names)


def _limited(group: Path, limit: str, used: str, prefix: str) -> Iterator[tuple[int, int]]:
    """Free and in all, nothing where the group has no limit. Cached files count as free, as in MemAvailable."""
    if not (group / limit).is_file() or (most := (group / limit).read_text().strip()) == "max":
        return
    stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    cached = sum(int(stat[f"{prefix}{kind}_file"]) for kind in ("active", "inactive"))
    yield int(most) - int((group / used).read_text()) + cached, int(most)
