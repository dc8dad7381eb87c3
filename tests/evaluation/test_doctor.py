"""`localspec doctor`: what each check finds, on this machine and on broken ones, and that it survives all of them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from huggingface_hub import constants

from localspec import llama, machine, storage
from localspec.cli.main import main
from localspec.evaluation import doctor
from localspec.evaluation.doctor import Check, Finding
from localspec.hub import registry
from localspec.llama import Device, binding
from localspec.machine import Pool
from localspec.storage import cache_dir

NAMES = [
    *("python", "llama-cpp-python", "build", "cpu", "amx", "kernels"),
    *("devices", "cache", "pairs", "torch", "self-test"),
]
HUB_CACHE = "Hugging Face cache"


@pytest.fixture
def nothing_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Empty caches: the default pair has not been pulled."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("LOCALSPEC_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def only(findings: Iterator[Finding]) -> Finding:
    (finding,) = findings
    return finding


def test_the_table_names_each_check_once() -> None:
    assert [check.name for check in doctor.CHECKS] == NAMES
    assert all(check.needs in (None, "llama-cpp-python") for check in doctor.CHECKS)
    assert binding.PINNED in doctor.PIP_BUILD


# --- the command


def test_json_is_a_list_of_findings(nothing_here: Path) -> None:
    done = CliRunner().invoke(main, ["doctor", "--json"])
    report = json.loads(done.stdout)
    assert all(set(line) == {"name", "status", "detail", "next"} for line in report)
    assert {line["status"] for line in report} <= {"ok", "warn", "fail"}
    found = {line["name"]: line for line in report}
    assert found["llama-cpp-python"]["status"] == found["cache"]["status"] == "ok"
    assert found["llama-cpp-python"]["detail"].startswith(binding.PINNED)
    for name in (f"pair {registry.DEFAULT}", "self-test"):
        assert (found[name]["status"], found[name]["next"]) == ("warn", f"localspec pull {registry.DEFAULT}")
    assert done.exit_code == any(line["status"] == "fail" for line in report) == 0
    assert done.stderr == ""


def test_lines_are_plain_text_in_a_pipe(monkeypatch: pytest.MonkeyPatch) -> None:
    findings = [
        Finding("a", "ok", "[fine]"),
        Finding("b", "warn", "could be better", "do this"),
        Finding("c", "fail", "broken", "do that"),
    ]
    monkeypatch.setattr(doctor, "examine", lambda: iter(findings))
    done = CliRunner().invoke(main, ["doctor"])
    assert done.exit_code == 1
    assert done.stdout.splitlines() == [
        "ok   a: [fine]",
        "warn b: could be better",
        "     -> do this",
        "fail c: broken",
        "     -> do that",
    ]
    monkeypatch.setattr(doctor, "examine", lambda: iter(findings[:2]))
    assert CliRunner().invoke(main, ["doctor"]).exit_code == 0


BROKEN = {
    "missing": ("raise ImportError('no')", "llama-cpp-python is not installed", "pip install"),
    "another version": ("__version__ = '0.1.0'", "but 0.1.0 is installed", "pip install"),
    "no library": ("raise RuntimeError('libllama.so: no')", "its library does not load", "reinstall it with"),
    "crashing": ("import os; os.abort()", "the process died: SIGABRT", "make setup"),
    "nonsense": ("import no.such.thing.at.all", "llama-cpp-python is not installed", "pip install"),
    "leaving": ("import sys; sys.exit(3)", "the process died: exit status 3", "make setup"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_llama_cpp_is_one_finding(nothing_here: Path, tmp_path: Path, name: str) -> None:
    code, detail, step = BROKEN[name]
    (tmp_path / "llama_cpp").mkdir()
    (tmp_path / "llama_cpp" / "__init__.py").write_text(code)
    environment = os.environ | {"PYTHONPATH": str(tmp_path), "NO_COLOR": "1"}
    command = [sys.executable, "-m", "localspec.cli.main", "doctor", "--json"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    report = json.loads(done.stdout)
    assert (done.returncode, done.stderr) == (1, "")
    assert [line["name"] for line in report if line["name"] != HUB_CACHE] == NAMES
    failed = [line for line in report if line["status"] == "fail"]
    assert [line["name"] for line in failed] == ["llama-cpp-python"]
    assert detail in failed[0]["detail"]
    assert step in failed[0]["next"]
    skipped = [line["name"] for line in report if line["detail"].startswith("not checked")]
    assert skipped == ["build", "cpu", "amx", "kernels", "devices", "pairs", "self-test"]


def test_a_check_that_breaks_is_a_finding_and_the_rest_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> Iterator[Finding]:
        yield Finding("first", "ok", "")
        raise ZeroDivisionError("by nothing")

    monkeypatch.setattr(doctor, "CHECKS", (Check("broken", broken), Check("python", doctor.python)))
    found = list(doctor.examine())
    assert found[0] == Finding("broken", "fail", "ZeroDivisionError: by nothing")
    assert found[1].name == "python"


def test_a_check_that_hangs_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "TIMEOUT_S", 0.01)
    (finding,) = doctor._in_child(doctor.CHECKS[1])
    assert (finding.status, finding.detail) == ("fail", "no answer in 0 seconds")


def test_a_python_that_cannot_start_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    (finding,) = doctor._in_child(doctor.CHECKS[1])
    assert finding.status == "fail"
    assert "/nowhere/python" in finding.detail


# --- how llama.cpp was built


def test_a_card_that_the_build_cannot_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "nvidia_card", lambda: "NVIDIA RTX 9090")
    finding = only(doctor.build())
    assert finding.status == ("ok" if "cuda" in doctor._backends() else "warn")
    monkeypatch.setattr(doctor, "_backends", lambda: ["cpu"])
    finding = only(doctor.build())
    assert finding.status == "warn"
    assert "RTX 9090" in finding.detail
    assert "CUDA=1" in str(finding.next)


def test_a_build_that_cannot_see_its_card(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_backends", lambda: ["cpu", "cuda"])
    monkeypatch.setattr(doctor, "nvidia_card", lambda: None)
    monkeypatch.setattr(llama, "gpu_offload", lambda: False)
    assert (only(doctor.build()).status, "nvidia-smi" in str(only(doctor.build()).next)) == ("warn", True)
    monkeypatch.setattr(llama, "gpu_offload", lambda: True)
    assert only(doctor.build()) == Finding("build", "ok", "built for cpu, cuda")


def test_this_build_names_its_backends() -> None:
    assert "cpu" in doctor._backends()
    assert "base" not in doctor._backends()


def test_cpu_features_the_build_leaves_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llama, "system_info", lambda: "CPU : AVX = 1 | AVX2 = 1 | OPENMP = 1 | ")
    monkeypatch.setattr(doctor, "cpu_flags", lambda: {"avx", "avx2", "fma", "avx512_bf16", "sse"})
    finding = only(doctor.cpu())
    assert finding.status == "warn"
    assert "AVX AVX2; this CPU also has FMA AVX512_BF16" in finding.detail
    monkeypatch.setattr(doctor, "cpu_flags", lambda: {"avx"})
    assert only(doctor.cpu()).status == "ok"


def test_cpu_flags_are_read_on_intel_and_arm(tmp_path: Path) -> None:
    (tmp_path / "x86").write_text("processor\t: 0\nflags\t\t: fpu avx2 fma\nbugs\t\t: none\n")
    (tmp_path / "arm").write_text("processor\t: 0\nFeatures\t: fp asimd asimddp i8mm\n")
    assert doctor.cpu_flags(tmp_path / "x86") == {"fpu", "avx2", "fma"}
    assert doctor.cpu_flags(tmp_path / "arm") == {"fp", "asimd", "asimddp", "i8mm"}
    assert doctor.cpu_flags(tmp_path / "nowhere") == set()


@pytest.mark.parametrize(("has", "safe", "status"), [(False, True, "ok"), (True, True, "ok"), (True, False, "warn")])
def test_amx(monkeypatch: pytest.MonkeyPatch, has: bool, safe: bool, status: str) -> None:
    monkeypatch.setattr(llama, "has_amx", lambda: has)
    monkeypatch.setattr(llama, "safe_to_repack", lambda: safe)
    finding = only(doctor.amx())
    assert finding.status == status
    assert ("-fno-tree-dse" in str(finding.next)) == (status == "warn")


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_an_nvidia_card_is_found_without_its_tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    assert doctor.nvidia_card(tmp_path) is None
    bus = tmp_path / "sys/bus/pci/devices"
    write(bus / "0000:00:01.0/vendor", "0x10de\n")
    write(bus / "0000:00:01.0/class", "0x040300\n")  # the card's sound
    assert doctor.nvidia_card(tmp_path) is None
    write(bus / "0000:00:02.0/vendor", "0x10de\n")
    write(bus / "0000:00:02.0/class", "0x030000\n")
    assert doctor.nvidia_card(tmp_path) == "its driver is missing"
    write(tmp_path / "proc/driver/nvidia/gpus/0000:00:02.0/information", "Model: \t\t NVIDIA H200\nIRQ: 1\n")
    assert doctor.nvidia_card(tmp_path) == "NVIDIA H200"


def test_an_nvidia_card_is_found_by_its_tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    smi = tmp_path / "nvidia-smi"
    write(smi, "#!/bin/sh\necho 'GPU 0: NVIDIA GeForce RTX 4090 (UUID: GPU-0123)'\n")
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert doctor.nvidia_card(tmp_path) == "NVIDIA GeForce RTX 4090"
    write(smi, "#!/bin/sh\necho 'no devices were found' >&2\nexit 6\n")
    assert doctor.nvidia_card(tmp_path) is None


# --- memory, folders, files


def test_devices_and_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    found = {finding.name: finding for finding in doctor.devices()}
    assert "free of" in found["memory"].detail
    assert found["device CPU"].status == "ok"
    monkeypatch.setattr(machine, "ram", lambda: Pool("RAM", 8 * 2**30, 2**29, swap=2**30))
    monkeypatch.setattr(llama, "devices", lambda: [Device("CUDA0", "H200", "gpu", 2**40, 2**39)])
    low, card = doctor.devices()
    assert (low.status, low.detail) == ("warn", "512.0 MiB free of 8.0 GiB, 1.0 GiB of swap")
    assert card == Finding("device CUDA0", "ok", "H200 (gpu), 512.0 GiB free of 1,024.0 GiB")


def test_a_cache_is_measured_and_not_made(nothing_here: Path) -> None:
    hub = nothing_here.with_name("hub")
    for finding, folder in zip(doctor.cache(), (nothing_here, hub), strict=True):
        assert (finding.status, finding.detail) == ("ok", f"{folder}, made when it is needed")
        assert not folder.exists()
    write(nothing_here / "models" / "x", "y" * 10**7)
    write(hub / "blobs" / "x", "y" * 2 * 10**7)
    (hub / "link").symlink_to(hub / "blobs" / "x")
    own, shared = (finding.detail for finding in doctor.cache())
    assert f"{nothing_here}: 0.01 GB in it" in own
    assert f"{hub}: 0.02 GB in it" in shared


def test_a_cache_that_cannot_be_written(nothing_here: Path) -> None:
    for path in (nothing_here, nothing_here.with_name("hub")):
        path.write_text("a file in the way")
    own, shared = doctor.cache()
    assert own.status == shared.status == "fail"
    assert "LOCALSPEC_CACHE" in str(own.next)
    assert (shared.name, "HF_HOME" in str(shared.next)) == (HUB_CACHE, True)


def test_a_full_disk(nothing_here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage.shutil, "disk_usage", lambda _: type("Usage", (), {"free": 5 * 10**8}))
    for finding in doctor.cache():
        assert (finding.status, "make room" in str(finding.next)) == ("warn", True)


def default_pair() -> Finding:
    return next(finding for finding in doctor.pairs() if finding.name == f"pair {registry.DEFAULT}")


def test_the_default_pair_is_here_and_complete() -> None:
    finding = default_pair()
    assert finding.status == "ok"
    assert "here and complete" in finding.detail
    assert "8,192 tokens" in finding.detail


def test_pairs_that_are_not_here_are_one_line(nothing_here: Path) -> None:
    default, others = doctor.pairs()
    assert (default.name, default.status) == (f"pair {registry.DEFAULT}", "warn")
    n = len(registry.names()) - 1
    assert others == Finding("pairs", "ok", f"{n} more can be pulled, see localspec models")


def test_a_pair_cut_off_in_the_middle(monkeypatch: pytest.MonkeyPatch, nothing_here: Path) -> None:
    assert (default_pair().status, default_pair().detail) == ("warn", "not here")
    monkeypatch.delenv("LOCALSPEC_CACHE")
    whole = registry.get(registry.DEFAULT).target_path()
    with whole.open("rb") as file:
        start = file.read(4 * 10**6)
    path = nothing_here / whole.relative_to(cache_dir())
    monkeypatch.setenv("LOCALSPEC_CACHE", str(nothing_here))
    path.parent.mkdir(parents=True)
    path.write_bytes(start)
    finding = default_pair()
    assert (finding.status, finding.next) == ("fail", f"localspec pull {registry.DEFAULT}")
    assert "cut off" in finding.detail


def test_a_pair_too_large_for_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "pools", lambda: [Pool("RAM", 2**26, 2**25)])
    finding = default_pair()
    assert finding.status == "warn"
    assert "here and complete, but" in finding.detail
    assert "needs" in finding.detail
    assert "\n" not in finding.detail


def test_torch_is_information_only(monkeypatch: pytest.MonkeyPatch) -> None:
    assert only(doctor.torch()).detail.endswith("for localspec distill")

    def missing(_: str) -> str:
        raise doctor.importlib.metadata.PackageNotFoundError

    monkeypatch.setattr(doctor.importlib.metadata, "version", missing)
    finding = only(doctor.torch())
    assert (finding.status, finding.next) == ("ok", "pip install 'localspec[distill]'")


# --- the self-test


def test_the_self_test_runs_the_default_pair() -> None:
    finding = only(doctor.self_test())
    assert finding.status == "ok"
    assert finding.detail.startswith("32 tokens without and with the drafter, ")
    assert finding.detail.endswith(" tokens/s, the same words")


def test_the_self_test_notices_other_words(monkeypatch: pytest.MonkeyPatch) -> None:
    from localspec.engine import generate

    honest = generate.sample_and_match

    def credulous(rows: Any, draft: Any, choose: Any) -> Any:  # a bug: whatever was drafted is believed
        n = len(draft.tokens)
        return ([*draft.tokens, 0], list(range(n + 1))) if n else honest(rows, draft, choose)

    monkeypatch.setattr(generate, "sample_and_match", credulous)
    finding = only(doctor.self_test())
    assert (finding.status, finding.next) == ("fail", "localspec check")
    assert finding.detail.endswith("other words")
