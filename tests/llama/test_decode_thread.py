"""llama.cpp beside torch: both configure a thread's AMX tile registers, each in its own way."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time

import pytest

from localspec.llama import decode_thread

BESIDE_TORCH = """
import torch, localspec
pair = localspec.load(n_ctx=512, n_threads=1)
said = []
for _ in range(3):
    pair.engine.forget()
    said.append(pair.generate("Why is the sky blue?", max_tokens=8, path="greedy").tokens)
    for n in (1, 5, 16, 37):
        torch.ones(n, 576, dtype=torch.bfloat16) @ torch.ones(576, 1536, dtype=torch.bfloat16)
print(said[0] == said[1] == said[2])
"""


def test_torch_and_llama_cpp_take_turns_on_one_thread() -> None:
    done = subprocess.run([sys.executable, "-c", BESIDE_TORCH], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "True\n"), done.stderr


def test_torchs_threads_are_ended_before_each_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """Left waiting they keep the processors, and decoding takes six times as long."""
    order: list[str] = []
    monkeypatch.setattr(decode_thread, "_has_amx", lambda: True)
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.setattr(decode_thread, "_end_openmp_threads", lambda: order.append("ended"))
    for _ in range(2):
        decode_thread.run(lambda: order.append("decoded"))
    assert order == ["ended", "decoded"] * 2


def test_a_call_runs_elsewhere_only_beside_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode_thread, "_has_amx", lambda: True)
    monkeypatch.setitem(sys.modules, "torch", None)
    here = threading.current_thread()
    assert decode_thread.run(threading.current_thread) is decode_thread.run(threading.current_thread) is not here
    with pytest.raises(ZeroDivisionError):
        decode_thread.run(lambda: 1 / 0)
    monkeypatch.setattr(decode_thread, "_has_amx", lambda: False)
    assert decode_thread.run(threading.current_thread) is here
    monkeypatch.setattr(decode_thread, "_has_amx", lambda: True)
    monkeypatch.delitem(sys.modules, "torch")
    assert decode_thread.run(threading.current_thread) is here


def test_an_interrupt_waits_for_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that a decode is still writing must not be freed or rolled back."""
    monkeypatch.setattr(decode_thread, "_has_amx", lambda: True)
    monkeypatch.setitem(sys.modules, "torch", None)
    done: list[bool] = []

    def work() -> None:
        import _thread

        _thread.interrupt_main()
        time.sleep(0.3)
        done.append(True)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored where tests run in the background
    try:
        with pytest.raises(KeyboardInterrupt):
            decode_thread.run(work)
    finally:
        signal.signal(signal.SIGINT, before)
    assert done
