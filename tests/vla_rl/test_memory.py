"""Memory that a control group leaves, from folders as the kernel shows them."""

from __future__ import annotations

from pathlib import Path

from vla_rl.memory import group_memory, host_memory

GIB = 2**30


def group(folder: Path, files: dict[str, object]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name).write_text(f"{text}\n")


def told(folder: Path, lines: str) -> list[tuple[int, int]]:
    (folder / "cgroup").write_text(lines)
    return list(group_memory(folder / "cgroup", folder / "root"))


def test_a_container_of_version_2(tmp_path: Path) -> None:
    """Its own group is the root that it sees; cached files can be dropped."""
    stat = f"anon 1\nactive_file {GIB}\ninactive_file {2 * GIB}"
    group(tmp_path / "root", {"memory.max": 16 * GIB, "memory.current": 5 * GIB, "memory.stat": stat})
    assert told(tmp_path, "0::/\n") == [(14 * GIB, 16 * GIB)]


def test_a_job_has_the_limits_of_all_groups_above_it(tmp_path: Path) -> None:
    stat = "active_file 0\ninactive_file 0"
    step, job = {"memory.max": "max", "memory.current": GIB}, {"memory.max": 8 * GIB, "memory.current": 3 * GIB}
    group(tmp_path / "root/slurm/job_7/step_0", step | {"memory.stat": stat})
    group(tmp_path / "root/slurm/job_7", job | {"memory.stat": stat})
    group(tmp_path / "root", {"cgroup.procs": 1})
    assert told(tmp_path, "0::/slurm/job_7/step_0\n") == [(5 * GIB, 8 * GIB)]


def test_version_1_in_a_container_that_is_told_the_path_of_the_host(tmp_path: Path) -> None:
    files = {"memory.limit_in_bytes": 4 * GIB, "memory.usage_in_bytes": GIB}
    stat = f"active_file 5\ntotal_active_file 0\ntotal_inactive_file {GIB // 2}"
    group(tmp_path / "root/memory", files | {"memory.stat": stat})
    lines = "9:cpu,cpuacct:/docker/abc\n4:memory:/docker/abc\n0::/system.slice\n"
    assert told(tmp_path, lines) == [(7 * GIB // 2, 4 * GIB)]


def test_of_this_machine() -> None:
    free, total = host_memory()
    assert 0 <= free <= total
    assert total < 2**60  # not the number that stands for no limit
