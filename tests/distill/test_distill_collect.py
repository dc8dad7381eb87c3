"""The second pass over written chats: what it keeps, where it goes on, what it refuses."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import tiny

from localspec.distill import collect as stage
from localspec.distill.collect import collect, loads
from localspec.distill.store import NONE, ChatRecord, Meta, Store, read, read_text
from localspec.distill.synthesise import candidates, synthesise
from localspec.errors import MissingError, OptionError
from localspec.llama import Context, Model, read_header


def write_text(folder: Path, lengths: list[int], *, n_vocab: int = 320, digest: str = "") -> Path:
    """Chats of letters, as another file of the model might have written them."""
    rng, letters = np.random.default_rng(0), np.array(tiny.letter_ids(), np.int32)
    with Store(folder, Meta("other.gguf", "0" * 64, 1, (), n_vocab, digest)) as store:
        for i, n in enumerate(lengths):
            tokens = rng.choice(letters, n)
            spans = [(n // 2, n - 2)], [(4, n // 2), (n - 2, n)]
            store.append(tokens, np.zeros((n, 0), np.float16), np.full(n, NONE), *spans, id=i, source="self")
    return folder


@pytest.mark.parametrize("arch", ["llama", "qwen35", "gemma3"])
def test_features_are_those_of_decoding_each_chat_alone(tmp_path: Path, arch: str) -> None:
    target = tiny.write_target(tmp_path / "target.gguf", arch)
    source = write_text(tmp_path / "text", [9, 40, 300, 200, 700, 11, 64])
    assert collect(target, source, tmp_path / "data", layers=[1, 3]) == 1324
    text, data = read_text(source), read(tmp_path / "data")
    assert data.chats == text.chats
    assert np.array_equal(data.tokens, text.tokens)
    assert data.meta.target == "target.gguf"
    with Model(target) as model, Context(model, n_ctx=1024, n_batch=1024, layers=[1, 3]) as ctx:
        for layer in (1, 3):
            ctx.want_layer_input(layer, True)
        for chat in data.chats:
            rows = slice(chat.start, chat.start + chat.n)
            ctx.clear()
            ctx.decode(data.tokens[rows], 0)
            features = np.concatenate([ctx.layer_input(layer, chat.n) for layer in (1, 3)], axis=1)
            np.testing.assert_allclose(data.features[rows], features, atol=0.02, rtol=0.02)
            logits, kept = ctx.logits(chat.n), data.candidates[rows]
            asked = np.zeros(chat.n, bool)
            for a, b in chat.answers:
                asked[a - 1 : b - 1] = True
            assert ((kept["id"][:, 0] >= 0) == asked).all()
            for i in np.flatnonzero(asked):
                expected = candidates(logits[i])
                assert kept["logit"][i, 0] == pytest.approx(expected["logit"][0], abs=0.05)
                assert kept["id"][i, 0] in expected["id"][:2]


def test_a_killed_pass_goes_on(tmp_path: Path) -> None:
    target = tiny.write_target(tmp_path / "target.gguf")
    source, folder = write_text(tmp_path / "text", [100 + i % 50 for i in range(400)]), tmp_path / "data"
    code = "import sys; from localspec.distill.collect import collect as c; c(*sys.argv[1:], n_threads=1)"
    command = [sys.executable, "-c", code, target, source, folder]
    run = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    end = time.monotonic() + 60
    while time.monotonic() < end and not ((folder / "chats.jsonl").exists() and (folder / "chats.jsonl").read_bytes()):
        time.sleep(0.01)
    run.send_signal(signal.SIGKILL)
    run.wait()
    before = read(folder)
    assert 0 < len(before.chats) < 400
    first = before.features[:100].copy()
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert f"collecting features of {49_800 - len(before.tokens):,} tokens: " in done.stderr
    assert f" MB in {folder}, about " in done.stderr
    after = read(folder)
    assert after.chats == read_text(source).chats
    assert np.array_equal(after.features[:100], first)
    assert json.loads((folder / "collect.jsonl").read_text().splitlines()[-1])["n_tokens"] == 49_800
    stamp = (folder / "collect.jsonl").stat().st_mtime_ns
    collect(target, source, folder)
    assert (folder / "collect.jsonl").stat().st_mtime_ns == stamp, "nothing is done twice"


def test_text_alone_can_be_written_and_filled_in(tmp_path: Path) -> None:
    target = tiny.write_target(tmp_path / "target.gguf", eog_bias=1.0)
    synthesise(target, tmp_path / "text", n_tokens=600, n_slots=4, n_threads=1, text_only=True)
    assert not (tmp_path / "text" / "features.bin").exists()
    with pytest.raises(MissingError, match=r"text without features\.bin; collect what is missing with --chats"):
        read(tmp_path / "text")
    collect(target, tmp_path / "text", tmp_path / "data")
    synthesise(target, tmp_path / "text", n_tokens=900, n_slots=4, n_threads=1, text_only=True)
    n = collect(target, tmp_path / "text", tmp_path / "data")
    assert n == len(read_text(tmp_path / "text").tokens) >= 900
    assert np.isfinite(read(tmp_path / "data").features).all()


def test_a_folder_of_an_earlier_version_is_a_source(tmp_path: Path) -> None:
    target = tiny.write_target(tmp_path / "target.gguf")
    source = write_text(tmp_path / "text", [30, 30])
    meta = json.loads((source / "meta.json").read_text())
    del meta["tokenizer_sha256"]
    (source / "meta.json").write_text(json.dumps(meta | {"layers": [1, 2]}))
    with pytest.raises(MissingError, match=r"without features\.bin"):
        read(source)
    assert collect(target, source, tmp_path / "data") == 60


def test_chats_of_another_tokenizer_or_other_chats_are_refused(tmp_path: Path) -> None:
    target = tiny.write_target(tmp_path / "target.gguf")
    digest = read_header(target).strings["tokenizer.ggml.tokens"][1]
    for i, (n_vocab, theirs) in enumerate([(321, ""), (320, "f" * 64)]):
        source = write_text(tmp_path / f"text{i}", [30], n_vocab=n_vocab, digest=theirs)
        with pytest.raises(OptionError, match=rf"by other\.gguf, whose tokenizer \({n_vocab} tokens"):
            collect(target, source, tmp_path / f"data{i}")
    collect(target, write_text(tmp_path / "same", [30, 20], digest=digest), tmp_path / "data")
    with pytest.raises(OptionError, match="holds other chats than"):
        collect(target, write_text(tmp_path / "more", [31, 20, 9]), tmp_path / "data")


def test_loads_fill_a_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stage, "N_BATCH", 100)
    chats = [ChatRecord(0, n, (), ()) for n in (60, 40, 10, 300, 50, 20, 20, 20)]
    assert [[chat.n for chat in load] for load in loads(chats, 3)] == [[60, 40], [10], [300], [50, 20, 20], [20]]
