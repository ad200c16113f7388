"""Memory limits of control groups, read from directories of files as the kernel shows them."""

from pathlib import Path

import psutil

from lean_finetune.core.memory_limits import MemoryLimit, free_host_bytes, memory_limits, oom_kills

GROUP_V2 = "0::/job/step\n"
GROUP_V1 = "9:name=systemd:/\n5:cpu,memory:/job/step\n1:cpuset:/\n0::/\n"


def write(root: Path, directory: str, **files: str) -> None:
    place = root / "sys/fs/cgroup" / directory
    place.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (place / name.replace("__", ".", 1)).write_text(text)


def member(root: Path, text: str) -> Path:
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/cgroup").write_text(text)
    return root


def group_v2(root: Path, directory: str, limit: str, used: int, inactive: int = 0) -> None:
    stat = f"anon 5\ninactive_file {inactive}\n"
    write(root, directory, memory__max=f"{limit}\n", memory__current=f"{used}\n", memory__stat=stat)


def test_the_tightest_limit_of_the_group_and_its_parents_counts(tmp_path: Path):
    """A job without a limit is killed at the limit of its parent group."""
    root = member(tmp_path, GROUP_V2)
    group_v2(root, "job/step", "max", 100)
    group_v2(root, "job", "4000", 3500, inactive=1000)
    group_v2(root, "", "3000", 500)
    assert [limit.limit_bytes for limit in memory_limits(root)] == [4000, 3000]
    assert free_host_bytes(root) == (1500, "within this container's memory limit of 3.906 KiB")


def test_version_1_writes_a_huge_number_for_no_limit(tmp_path: Path):
    """That number is not a limit, and another controller's path is not that of memory."""
    root = member(tmp_path, GROUP_V1)
    stat = "inactive_file 1\ntotal_inactive_file 300\n"
    files = {"memory__usage_in_bytes": "700\n", "memory__stat": stat}
    write(root, "memory/job/step", memory__limit_in_bytes="9223372036854771712\n", **files)
    assert memory_limits(root) == []
    write(root, "memory/job", memory__limit_in_bytes="1000\n", **files)
    assert memory_limits(root) == [MemoryLimit(limit_bytes=1000, room_bytes=600)]


def test_a_container_sees_its_group_only_at_the_root(tmp_path: Path):
    """The host's path of the group does not exist inside."""
    root = member(tmp_path, GROUP_V1)
    write(root, "memory", memory__limit_in_bytes="500\n", memory__usage_in_bytes="900\n", memory__stat="cache 1\n")
    write(root, "memory", memory__oom_control="oom_kill_disable 0\nunder_oom 0\noom_kill 2\n")
    assert memory_limits(root) == [MemoryLimit(limit_bytes=500, room_bytes=0)] and oom_kills(root) == 2


def test_without_limits_the_ram_of_the_machine_counts(tmp_path: Path):
    """No Linux, or no control groups."""
    assert memory_limits(tmp_path) == [] and oom_kills(tmp_path) is None
    free, reason = free_host_bytes(tmp_path)
    assert 0 < free <= psutil.virtual_memory().total and reason == "of this machine's RAM"
    assert memory_limits(member(tmp_path, GROUP_V2)) == []


def test_oom_kills_are_those_of_the_innermost_group(tmp_path: Path):
    """A kill in another job's group must not count."""
    root = member(tmp_path, GROUP_V2)
    write(root, "job", memory__events="low 0\noom 9\noom_kill 7\n")
    assert oom_kills(root) == 7
    write(root, "job/step", memory__events="low 0\noom 1\noom_kill 1\n")
    assert oom_kills(root) == 1
