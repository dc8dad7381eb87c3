"""What memory there is: the devices ggml sees, and what a container leaves of RAM."""

from __future__ import annotations

from pathlib import Path

from localspec.llama import devices
from localspec.machine import Pool, _narrowed, cgroup_limits, pools

GIB = 2**30


def test_ggml_sees_the_cpu() -> None:
    kinds = [device.kind for device in devices()]
    assert "cpu" in kinds
    assert all(device.name and device.total >= device.free >= 0 for device in devices())


def test_ram_comes_first_and_is_plausible() -> None:
    ram = pools()[0]
    assert ram.name == "RAM"
    assert 2**28 < ram.free <= ram.total < 2**45


def folder(path: Path, **files: str) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (path / name.replace("__", ".")).write_text(text)
    return path


def test_version_2_limits_of_a_group_and_its_parents(tmp_path: Path) -> None:
    root = folder(tmp_path / "cgroup")
    stat = "anon 1\ninactive_file 300\nactive_file 100\n"
    folder(root / "a", memory__max="4000\n", memory__current="1000\n", memory__stat=stat)
    folder(root / "a" / "b", memory__max="max\n", memory__current="500\n", memory__stat=stat)
    member = folder(tmp_path, own="0::/a/b\n") / "own"
    assert cgroup_limits(root, member) == [(4000, 600)]


def test_version_1_limits_inside_a_container(tmp_path: Path) -> None:
    """The path of the group is the host's; only the controller's own folder exists."""
    root = tmp_path / "cgroup"
    stat = "inactive_file 50\n"
    folder(root / "memory", memory__limit_in_bytes="900", memory__usage_in_bytes="100", memory__stat=stat)
    member = folder(tmp_path, own="5:devices:/x\n4:memory:/docker/0123\n0::/\n") / "own"
    assert cgroup_limits(root, member) == [(900, 50)]


def test_no_control_groups_no_limits(tmp_path: Path) -> None:
    assert cgroup_limits(tmp_path, tmp_path / "nowhere") == []
    assert cgroup_limits(tmp_path, folder(tmp_path, own="0::/\nnonsense\n") / "own") == []


def test_a_limit_narrows_ram_and_its_swap() -> None:
    ram = Pool("RAM", 32 * GIB, 20 * GIB, swap=8 * GIB)
    assert _narrowed(ram, [(2**63, GIB)]) == ram
    assert _narrowed(ram, [(8 * GIB, 3 * GIB)]) == Pool("RAM", 8 * GIB, 5 * GIB)
    assert _narrowed(ram, [(8 * GIB, 9 * GIB)]).free == 0
