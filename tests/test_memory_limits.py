"""The limit of a container, read from trees of files as the kernel shows them."""

from pathlib import Path

import psutil
import pytest

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


def test_the_tightest_group_around_the_process_counts(tmp_path: Path):
    """A job whose own group has no limit, killed by that of its parent."""
    root = member(tmp_path, GROUP_V2)
    group_v2(root, "job/step", "max", 100)
    group_v2(root, "job", "4000", 3500, inactive=1000)
    group_v2(root, "", "3000", 500)
    assert [limit.limit_bytes for limit in memory_limits(root)] == [4000, 3000]
    assert free_host_bytes(root) == (1500, "within this container's memory limit of 3.906 KiB")


def test_version_1_and_its_way_to_say_no_limit(tmp_path: Path):
    """2**63 bytes taken for a limit, or another controller's path for that of memory."""
    root = member(tmp_path, GROUP_V1)
    stat = "inactive_file 1\ntotal_inactive_file 300\n"
    files = {"memory__usage_in_bytes": "700\n", "memory__stat": stat}
    write(root, "memory/job/step", memory__limit_in_bytes="9223372036854771712\n", **files)
    assert memory_limits(root) == []
    write(root, "memory/job", memory__limit_in_bytes="1000\n", **files)
    assert memory_limits(root) == [MemoryLimit(limit_bytes=1000, room_bytes=600)]


def test_a_container_sees_its_group_at_the_top_alone(tmp_path: Path):
    """The host's path of the group does not exist inside."""
    root = member(tmp_path, GROUP_V1)
    write(root, "memory", memory__limit_in_bytes="500\n", memory__usage_in_bytes="900\n", memory__stat="cache 1\n")
    write(root, "memory", memory__oom_control="oom_kill_disable 0\nunder_oom 0\noom_kill 2\n")
    assert memory_limits(root) == [MemoryLimit(limit_bytes=500, room_bytes=0)] and oom_kills(root) == 2


def test_without_a_limit_the_machines_ram_counts(tmp_path: Path):
    """No Linux, or no groups: nothing to hold against."""
    assert memory_limits(tmp_path) == [] and oom_kills(tmp_path) is None
    free, told = free_host_bytes(tmp_path)
    assert 0 < free <= psutil.virtual_memory().total and told == "of this machine's RAM"
    assert memory_limits(member(tmp_path, GROUP_V2)) == []


def test_kills_are_those_of_the_own_group(tmp_path: Path):
    """Another job's death taken for one's own."""
    root = member(tmp_path, GROUP_V2)
    write(root, "job", memory__events="low 0\noom 9\noom_kill 7\n")
    assert oom_kills(root) == 7
    write(root, "job/step", memory__events="low 0\noom 1\noom_kill 1\n")
    assert oom_kills(root) == 1


@pytest.mark.skipif(not Path("/proc/self/cgroup").exists(), reason="needs Linux")
def test_this_machines_own_tree_can_be_read():
    """Files that differ from those written here."""
    assert all(0 <= limit.room_bytes <= limit.limit_bytes for limit in memory_limits())
    assert free_host_bytes()[0] > 0 and (oom_kills() or 0) >= 0
