"""What a process may use, by the files of control groups as kernels and container engines write them."""

from __future__ import annotations

import math
import os
from pathlib import Path

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.workers.machine import cgroups
from kvtier.workers.machine.limits import cores_here, cpu_quota, cpus_here, oom_kills, read_limits

GIB = 2**30

V2_MOUNT = (
    "30 23 0:27 / /sys/fs/cgroup rw,nosuid,nodev,noexec,relatime shared:4 - cgroup2 cgroup2 rw,nsdelegate\n"
)
# Ubuntu 18.04: version 1 for all controllers, version 2 beside them without any.
HYBRID_GROUPS = (
    "12:pids:/user.slice/user-1000.slice\n11:memory:/user.slice\n4:cpu,cpuacct:/user.slice\n"
    "1:name=systemd:/user.slice/user-1000.slice/session-2.scope\n0::/user.slice/user-1000.slice/session-2.scope\n"
)
HYBRID_MOUNTS = (
    "25 22 0:22 / /sys/fs/cgroup ro,nosuid,nodev,noexec shared:9 - tmpfs tmpfs ro,mode=755\n"
    "26 25 0:23 / /sys/fs/cgroup/unified rw,nosuid shared:10 - cgroup2 cgroup rw,nsdelegate\n"
    "27 25 0:24 / /sys/fs/cgroup/systemd rw,nosuid shared:11 - cgroup cgroup rw,xattr,name=systemd\n"
    "33 25 0:30 / /sys/fs/cgroup/cpu,cpuacct rw,nosuid shared:16 - cgroup cgroup rw,cpu,cpuacct\n"
    "36 25 0:33 / /sys/fs/cgroup/memory rw,nosuid shared:19 - cgroup cgroup rw,memory\n"
)
# Docker with version 1: the container sees its group's folder as the root of the mount.
DOCKER_V1_GROUPS = "9:memory:/docker/4f2a\n4:cpu,cpuacct:/docker/4f2a\n0::/system.slice/containerd.service\n"
DOCKER_V1_MOUNTS = (
    "740 739 0:30 /docker/4f2a /sys/fs/cgroup/cpu,cpuacct ro,nosuid master:16 - cgroup cgroup rw,cpu,cpuacct\n"
    "745 739 0:33 /docker/4f2a /sys/fs/cgroup/memory ro,nosuid master:19 - cgroup cgroup rw,memory\n"
)
# Kubernetes with version 2 and the host's groups mounted.
POD_GROUP = "/kubepods.slice/kubepods-burstable.slice/kubepods-pod7.slice/cri-containerd-9a.scope"
STAT_V2 = "anon 500\nfile 900\ninactive_file 300\nactive_file 200\nslab 10\n"
STAT_V1 = "cache 1\nrss 2\ninactive_file 7\nactive_file 7\ntotal_inactive_file 300\ntotal_active_file 200\n"


@pytest.mark.parametrize(
    ("groups", "mounts", "controller", "folders"),
    [
        ("0::/\n", V2_MOUNT, "cpu", ["/sys/fs/cgroup"]),
        ("0::/a/b\n", V2_MOUNT, "memory", ["/sys/fs/cgroup/a/b", "/sys/fs/cgroup/a", "/sys/fs/cgroup"]),
        (
            *(HYBRID_GROUPS, HYBRID_MOUNTS, "cpu"),
            ["/sys/fs/cgroup/cpu,cpuacct/user.slice", "/sys/fs/cgroup/cpu,cpuacct"],
        ),
        (
            *(HYBRID_GROUPS, HYBRID_MOUNTS, "memory"),
            ["/sys/fs/cgroup/memory/user.slice", "/sys/fs/cgroup/memory"],
        ),
        (DOCKER_V1_GROUPS, DOCKER_V1_MOUNTS, "memory", ["/sys/fs/cgroup/memory"]),
        # The path of a group outside what is mounted, as `docker run --cgroupns host` without the host's mounts has it.
        ("4:cpu:/docker/other\n", DOCKER_V1_MOUNTS.replace(",cpuacct", ""), "cpu", ["/sys/fs/cgroup/cpu"]),
        ("0::/../../outer\n", V2_MOUNT, "cpu", ["/sys/fs/cgroup"]),
        (
            "0::/x\n",
            V2_MOUNT.replace("/sys/fs/cgroup rw", "/mnt/c\\040g rw"),
            "cpu",
            ["/mnt/c g/x", "/mnt/c g"],
        ),
        ("", V2_MOUNT, "cpu", []),
        ("0::/\n", "", "cpu", []),
        ("0::/\n", HYBRID_MOUNTS.replace("cgroup2", "tmpfs"), "cpu", []),
        ("nonsense\n::\n", "nonsense - \n\n", "cpu", []),
    ],
)
def test_the_groups_of_a_process_are_its_own_and_all_above_it(
    groups: str, mounts: str, controller: str, folders: list[str]
) -> None:
    assert cgroups.folders(groups, mounts, controller) == folders


@pytest.mark.parametrize(
    ("files", "quota"),
    [
        ({"cpu.max": "max 100000\n"}, None),
        ({"cpu.max": "150000 100000\n"}, 1.5),
        ({"cpu.max": "5000 10000\n"}, 0.5),
        ({"cpu.cfs_quota_us": "-1\n", "cpu.cfs_period_us": "100000\n"}, None),
        ({"cpu.cfs_quota_us": "200000\n", "cpu.cfs_period_us": "100000\n"}, 2.0),
        ({"cpu.cfs_quota_us": "200000\n"}, None),
        ({"cpu.cfs_quota_us": "0\n", "cpu.cfs_period_us": "0\n"}, None),
        ({"cpu.max": "\n"}, None),
        ({}, None),
    ],
)
def test_a_quota_is_told_in_cpus(files: dict[str, str], quota: float | None) -> None:
    assert cgroups.cpu_quota(files) == quota


@pytest.mark.parametrize(
    ("files", "limit", "used"),
    [
        ({"memory.max": "max\n", "memory.current": "1000\n", "memory.stat": STAT_V2}, None, 500),
        ({"memory.max": "2000\n", "memory.high": "max\n", "memory.current": "1000\n"}, 2000, 1000),
        ({"memory.max": "2000\n", "memory.high": "1500\n", "memory.current": "7\n"}, 1500, 7),
        ({"memory.limit_in_bytes": "9223372036854771712\n", "memory.usage_in_bytes": "1000\n"}, None, 1000),
        (
            {
                "memory.limit_in_bytes": "1073741824\n",
                "memory.usage_in_bytes": "1000\n",
                "memory.stat": STAT_V1,
            },
            GIB,
            500,
        ),
        ({"memory.max": "0\n", "memory.current": "100\n", "memory.stat": STAT_V2}, 0, 0),
        ({"memory.max": "?\n", "memory.current": "\n", "memory.stat": "x y z\n"}, None, 0),
        ({}, None, 0),
    ],
)
def test_memory_that_the_kernel_can_take_back_is_not_used(
    files: dict[str, str], limit: int | None, used: int
) -> None:
    assert (cgroups.memory_limit(files), cgroups.memory_used(files)) == (limit, used)


@pytest.mark.parametrize(
    ("files", "kills"),
    [
        ({"memory.events": "low 0\nhigh 0\nmax 12\noom 3\noom_kill 2\noom_group_kill 0\n"}, 2),
        ({"memory.oom_control": "oom_kill_disable 0\nunder_oom 0\noom_kill 5\n"}, 5),
        ({"memory.oom_control": "oom_kill_disable 0\nunder_oom 0\n"}, None),  # kernels before 4.13
        ({}, None),
    ],
)
def test_kills_for_memory_are_counted(files: dict[str, str], kills: int | None) -> None:
    assert cgroups.oom_kills(files) == kills


@given(groups=st.text(max_size=80), mounts=st.text(max_size=200), content=st.text(max_size=40))
def test_no_text_of_these_files_ends_in_an_exception(groups: str, mounts: str, content: str) -> None:
    cgroups.folders(groups, mounts, "cpu")
    files = dict.fromkeys((*cgroups.CPU_FILES, *cgroups.MEMORY_FILES), content)
    cgroups.cpu_quota(files)
    cgroups.memory_limit(files)
    cgroups.memory_used(files)
    cgroups.oom_kills(files)


# ---- read from a machine ---------------------------------------------------------------------------------------------


class Machine:
    """Files of a machine below a folder."""

    def __init__(self, root: Path, groups: str, mounts: str) -> None:
        self.root = root
        self.write("proc/self/cgroup", groups)
        self.write("proc/self/mountinfo", mounts)

    def write(self, name: str, text: str) -> None:
        file = self.root / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)

    def group(self, folder: str, **files: str) -> None:
        """Files of a group, with __ for each dot."""
        for name, text in files.items():
            self.write(f"{folder}/{name.replace('__', '.')}", f"{text}\n")


@pytest.fixture
def pod(tmp_path: Path) -> Machine:
    machine = Machine(tmp_path, f"0::{POD_GROUP}\n", V2_MOUNT)
    machine.group("sys/fs/cgroup", cpu__stat="")
    machine.group(f"sys/fs/cgroup{POD_GROUP}", cpu__max="max 100000", memory__max="max", memory__current="7")
    return machine


def test_without_groups_and_limits_all_of_the_machine_may_be_used(tmp_path: Path, pod: Machine) -> None:
    whole = min(psutil.cpu_count(logical=False) or 1, len(os.sched_getaffinity(0)))

    for root in (tmp_path / "nowhere", pod.root):
        limits = read_limits(root)
        assert limits.memory_bytes == psutil.virtual_memory().total and limits.memory_file == ""
        assert (limits.cpu_quota, limits.cores, cpus_here(root)) == (
            None,
            whole,
            len(os.sched_getaffinity(0)),
        )


def test_the_tightest_group_above_a_process_counts(pod: Machine) -> None:
    parent = f"sys/fs/cgroup{POD_GROUP.rpartition('/')[0]}"
    pod.group(parent, cpu__max="100000 100000", memory__max=str(GIB), memory__current=str(3 * GIB // 4))
    pod.group(f"sys/fs/cgroup{POD_GROUP}", cpu__max="800000 100000", memory__max=str(2 * GIB))

    limits = read_limits(pod.root)

    assert (limits.cpu_quota, limits.cores) == (1.0, 1)
    assert (limits.memory_bytes, limits.memory_file) == (GIB, f"/{parent}")
    assert limits.memory_free_bytes == GIB // 4


def test_what_is_free_is_the_least_that_any_group_has_left(pod: Machine) -> None:
    """The group with the smaller limit may have more left."""
    parent = f"sys/fs/cgroup{POD_GROUP.rpartition('/')[0]}"
    pod.group(parent, memory__max=str(2 * GIB), memory__current=str(2 * GIB - 5))
    pod.group(f"sys/fs/cgroup{POD_GROUP}", memory__max=str(GIB), memory__current="0")

    assert read_limits(pod.root).memory_free_bytes == 5


@pytest.mark.parametrize(
    ("quota", "cores"), [(0.1, 1), (0.99, 1), (1.0, 1), (1.9, 1), (2.0, 2), (1000.0, None)]
)
def test_threads_never_exceed_a_quota(pod: Machine, quota: float, cores: int | None) -> None:
    pod.group(f"sys/fs/cgroup{POD_GROUP}", cpu__max=f"{int(quota * 100_000)} 100000")
    physical = min(psutil.cpu_count(logical=False) or 1, len(os.sched_getaffinity(0)))

    assert cpu_quota(pod.root) == pytest.approx(quota)
    assert cores_here(pod.root) == min(physical, cores or physical)
    assert 1 <= cpus_here(pod.root) <= max(1, math.floor(quota))


def test_limits_of_version_1_are_read_where_both_versions_are_mounted(tmp_path: Path) -> None:
    machine = Machine(tmp_path, HYBRID_GROUPS, HYBRID_MOUNTS)
    machine.group(
        "sys/fs/cgroup/cpu,cpuacct/user.slice", cpu__cfs_quota_us="50000", cpu__cfs_period_us="100000"
    )
    machine.group(
        "sys/fs/cgroup/memory/user.slice", memory__limit_in_bytes=str(GIB), memory__usage_in_bytes="24"
    )
    machine.group("sys/fs/cgroup/memory/user.slice", memory__oom_control="under_oom 0\noom_kill 4")
    machine.group("sys/fs/cgroup/unified/user.slice", cpu__max="1 100000")  # no controller is there

    limits = read_limits(tmp_path)

    assert (limits.cpu_quota, limits.memory_bytes, limits.memory_free_bytes) == (0.5, GIB, GIB - 24)
    assert oom_kills(tmp_path) == 4


def test_kills_are_those_of_the_own_group_and_else_those_of_the_machine(pod: Machine) -> None:
    pod.write("proc/vmstat", "pgfault 7\noom_kill 9\n")
    assert oom_kills(pod.root) == 9

    pod.group(f"sys/fs/cgroup{POD_GROUP}", memory__events="oom 1\noom_kill 1")

    assert oom_kills(pod.root) == 1


def test_the_limits_of_this_machine_can_be_read() -> None:
    limits = read_limits()

    assert 0 < limits.cores <= (psutil.cpu_count() or 1)
    assert 0 < limits.memory_free_bytes <= limits.memory_bytes <= psutil.virtual_memory().total
    assert limits.shm_bytes >= limits.shm_free_bytes >= 0
    assert limits.open_files is None or limits.open_files > 0
