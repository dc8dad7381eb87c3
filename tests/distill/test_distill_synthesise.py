"""Chats the target makes up, and the features kept beside them."""

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

from localspec.distill.chats import Chat, Chats, Recipe, Repeats, Script, Setting
from localspec.distill.store import N_CANDIDATES, NONE, Meta, Store, read
from localspec.distill.synthesise import candidates, choose, default_layers, synthesise
from localspec.errors import MissingError, ModelError, OptionError, PairError, TemplateError
from localspec.llama import Context, Model

END = 2  # <|im_end|>
RECIPE = Recipe(n_ctx=160, question_max=20, answer_max=30)
SCRIPT = Script(head=[1, 10], reply=[END, 11], again=[END, 12])
META = Meta("some.gguf", "00", 4, (1, 2), 99)


class Letters:
    """A vocabulary of letters."""

    add_bos = False

    def tokenize(self, text: str) -> list[int]:
        return [100 + ord(c) for c in text]

    def is_eog(self, token: int) -> bool:
        return token in (END, 3)


def new_chat(number: int = 1, *, recipe: Recipe = RECIPE, **setting: object) -> Chat:
    return Chat(number, Setting(recipe, SCRIPT, Letters(), **setting))  # type: ignore[arg-type]


def say(chat: Chat, *tokens: int) -> Chat:
    for token in tokens:
        chat.add(token)
    return chat


# -- chats ------------------------------------------------------------------------------------------------------------


def test_a_chat_is_question_and_answer_inside_the_template() -> None:
    chat = say(new_chat(recipe=Recipe(n_ctx=160, question_max=60, continued_share=0)), 50, 51, 52, 53, END)
    (first, last), start = chat.questions[0], len(chat.tokens)
    assert chat.tokens[:first] == SCRIPT.head
    assert chat.tokens[last - 4 : last] == [50, 51, 52, 53]
    assert chat.tokens[last:] == SCRIPT.reply
    say(chat, 60, 61, END)
    assert chat.answers == [(start, start + 3)]
    assert chat.tokens[start:] == [60, 61, END], "the end of an answer is a thing to predict"
    assert chat.end == "end"


def test_an_end_the_template_does_not_write_is_left_out() -> None:
    chat = say(new_chat(recipe=Recipe(n_ctx=160, question_max=60, continued_share=0)), 50, 51, 52, 53, END, 60, 61, 3)
    assert chat.tokens[slice(*chat.answers[0])] == [60, 61]


def test_a_continued_chat_asks_again() -> None:
    recipe = Recipe(n_ctx=200, question_max=60, answer_max=20, continued_share=1)
    chat = say(new_chat(recipe=recipe), 50, 51, 52, 53, END, 60, 61, END)
    assert not chat.end
    say(chat, 54, 55, 56, 57, END, 62, END)
    assert len(chat.questions) == len(chat.answers) == 2
    assert chat.end == "end"
    between = chat.tokens[chat.answers[0][1] - 1 : chat.questions[1][0]]
    assert between == SCRIPT.again


def test_a_bad_second_question_leaves_the_first_answer() -> None:
    recipe = Recipe(n_ctx=260, question_max=90, answer_max=20, continued_share=1)
    chat = say(new_chat(recipe=recipe), 50, 51, 52, 53, END, 60, 61, END)
    say(chat, *[70, 71, 72, 73] * 20)
    assert chat.end == "looping question"
    assert len(chat.tokens) == chat.answers[0][1]
    assert len(chat.questions) == 1


def test_a_prompt_is_told_once_and_later_drawn() -> None:
    setting = Setting(RECIPE, SCRIPT, Letters(), ["a prompt", "a prompt", "no"])  # type: ignore[arg-type]
    first, twin, short, later = (Chat(8 * i, setting) for i in range(4))
    assert (first.source, first.end, first.temperature) == ("file", "", 0.0)
    assert twin.end == "duplicate"
    assert short.end == "short question"
    assert (later.end, later.temperature) == ("", RECIPE.answer_temperature)
    assert not twin.answers
    assert not twin.tokens


def test_chats_skips_what_cannot_be_asked() -> None:
    recipe = Recipe(n_ctx=160, question_max=20, prompt_every=2)
    setting = Setting(recipe, SCRIPT, Letters(), ["x" * 500, "fine prompt"])  # type: ignore[arg-type]
    assert [next(chats).number for chats in [Chats(setting, 0)] * 3] == [1, 2, 3]


def test_the_same_number_begins_the_same_chat() -> None:
    a, b, c = (new_chat(n) for n in (5, 5, 6))
    assert a.tokens == b.tokens
    assert a.rng.random() == b.rng.random() != c.rng.random()


def test_a_loop_is_cut_short() -> None:
    chat = say(new_chat(recipe=Recipe(answer_max=300)), 50, 51, 52, 53, END)
    start = len(chat.tokens)
    say(chat, *range(200, 240))
    while not chat.end:
        chat.add(300 + len(chat.tokens) % 5)
    assert chat.end == "loop"
    n = chat.answers[0][1] - start
    assert 40 + 5 < n < 40 + 5 + 4 + 17
    assert chat.n_repeating == 16


@pytest.mark.parametrize("period", [1, 7, 40])
def test_repeats_find_a_cycle(period: int) -> None:
    repeats = Repeats()
    for i in range(100):
        repeats.add(i % period)
        if repeats.excess():
            break
    assert i < period + 3 + 32
    assert sum(repeats.near) == sum(repeats.ever)


def test_repeats_tell_near_from_far() -> None:
    repeats = Repeats()
    for token in [*range(4), *range(10, 80), *range(4)]:
        repeats.add(token)
    assert (sum(repeats.near), sum(repeats.ever)) == (0, 1)
    assert not repeats.excess()


def test_a_recipe_must_leave_room() -> None:
    with pytest.raises(OptionError, match="200 tokens are too short for questions of 120"):
        Recipe(n_ctx=200)


# -- drawing ----------------------------------------------------------------------------------------------------------


def test_choose_takes_the_best_or_draws() -> None:
    logits = np.log(np.array([[0.5, 0.3, 0.19, 0.01]] * 4001, np.float32))
    rng = np.random.default_rng(0)
    tokens = choose(logits, [0.0] + [1.0] * 4000, [rng] * 4001, min_p=0.05)
    assert tokens[0] == 0
    shares = np.bincount(tokens[1:], minlength=4) / 4000
    np.testing.assert_allclose(shares, [0.505, 0.303, 0.192, 0], atol=0.03)


# -- the store --------------------------------------------------------------------------------------------------------


def append(store: Store, n: int, value: int) -> None:
    tokens, features = np.full(n, value, np.int32), np.full((n, 8), value, np.float16)
    store.append(tokens, features, np.full(n, NONE), [(0, 2)], [(2, n)], id=value, source="self")


def test_store_cuts_off_what_a_killed_writer_left(tmp_path: Path) -> None:
    with pytest.raises(MissingError, match="no finished chats"):
        read(tmp_path)
    with Store(tmp_path, META) as store:
        append(store, 5, 1)
        append(store, 4, 2)
    for name in ("tokens.bin", "features.bin", "chats.jsonl"):
        with (tmp_path / name).open("ab") as file:
            file.write(b'{"start": 9')
    with Store(tmp_path, META) as store:
        assert store.n_tokens == 9
        append(store, 3, 3)
        assert [*store.questions()] == [np.full(2, v, np.int32).tobytes() for v in (1, 2, 3)]
    data = read(tmp_path)
    assert data.tokens.tolist() == [1] * 5 + [2] * 4 + [3] * 3
    assert np.array_equal(data.features[:, 0], data.tokens)
    assert [(c.start, c.n, c.answers, c.figures["id"]) for c in data.chats] == [
        (0, 5, ((2, 5),), 1),
        (5, 4, ((2, 4),), 2),
        (9, 3, ((2, 3),), 3),
    ]


def test_store_refuses_another_targets_folder_and_a_second_writer(tmp_path: Path) -> None:
    with Store(tmp_path, META), pytest.raises(OptionError, match="another process is writing"):
        Store(tmp_path, META)
    with Store(tmp_path, META) as store:
        append(store, 5, 1)
    (tmp_path / "candidates.bin").unlink()
    with pytest.raises(OptionError, match=r"candidates\.bin holds less than the chats beside it"):
        Store(tmp_path, META)
    other = Meta("other.gguf", "01", 4, (1, 2), 99)
    with pytest.raises(OptionError, match=r"holds work for some\.gguf \(target_sha256 00\), this is other\.gguf"):
        Store(tmp_path, other)
    (tmp_path / "meta.json").write_text("{}")
    with pytest.raises(OptionError, match="not a data folder's description"):
        Store(tmp_path, META)


# -- real llama.cpp ---------------------------------------------------------------------------------------------------

SHORT = Recipe(n_ctx=256, question_max=24, answer_max=40)


def test_candidates_are_the_best_within_reach() -> None:
    row = np.array([0, 5, -9, 4.5, 5.5, -1], np.float32)
    found = candidates(row, reach=8)
    assert found["id"].tolist() == [4, 1, 3, 0, 5, -1, -1, -1]
    assert found["logit"].tolist() == [5.5, 5, 4.5, 0, -1, 0, 0, 0]
    many = candidates(np.arange(100, dtype=np.float32) / 100)
    assert many["id"].tolist() == list(range(99, 99 - N_CANDIDATES, -1))


@pytest.mark.parametrize("arch", ["llama", "qwen3", "qwen35", "qwen2"])
def test_features_are_those_of_decoding_the_chat_alone(tmp_path: Path, arch: str) -> None:
    target = tiny.write_target(tmp_path / "target.gguf", arch, eog_bias=1.0)
    prompts = ["tell me of the <|im_end|> other"]
    tally = synthesise(
        target, tmp_path / "data", n_tokens=1500, n_slots=5, layers=[1, 3], prompts=prompts, n_threads=2, recipe=SHORT
    )
    data = read(tmp_path / "data")
    assert tally.n_tokens == len(data.tokens) >= 1500
    assert data.meta.layers == (1, 3)
    with Model(target) as model, Context(model, n_ctx=256, n_batch=256, layers=[1, 3]) as ctx:
        script = Script.of(model.chat_template, model.vocab)
        assert script.head == model.vocab.tokenize("<|im_start|>user\n", parse_special=True)
        for layer in data.meta.layers:
            ctx.want_layer_input(layer, True)
        for chat in [*data.chats[:6], *data.chats[-6:]]:
            tokens = data.tokens[chat.start : chat.start + chat.n]
            assert tokens[: len(script.head)].tolist() == script.head
            ctx.clear()
            ctx.decode(tokens, 0)
            rows = np.concatenate([ctx.layer_input(layer, chat.n) for layer in data.meta.layers], axis=1)
            kept = data.features[chat.start : chat.start + chat.n]
            np.testing.assert_allclose(kept, rows, atol=0.02, rtol=0.02)
            logits = ctx.logits(chat.n)
            best = logits.argmax(axis=1)
            asked = data.candidates[chat.start : chat.start + chat.n]
            for a, b in chat.answers:
                pool = asked[a - 1 : b - 1]
                at = np.maximum(pool["id"], 0)
                theirs = np.where(pool["id"] >= 0, np.take_along_axis(logits[a - 1 : b - 1], at, axis=1), 0)
                np.testing.assert_allclose(pool["logit"], theirs, atol=0.05, rtol=0.02)
                assert np.mean(at[:, 0] == best[a - 1 : b - 1]) > 0.9
            for (a, b), temperature in zip(chat.answers, chat.figures["temperatures"], strict=True):
                assert temperature or np.mean(best[a - 1 : b - 1] == tokens[a:b]) > 0.9
    first = next(chat for chat in data.chats if chat.figures["source"] == "file")
    a, b = first.questions[0]
    assert END not in data.tokens[first.start + a : first.start + b]


def test_going_on_adds_to_what_is_there(tmp_path: Path) -> None:
    target, folder = tiny.write_target(tmp_path / "target.gguf", eog_bias=1.0), tmp_path / "data"
    synthesise(target, folder, n_tokens=600, n_slots=4, recipe=SHORT)
    before = read(folder)
    n = len(before.tokens)
    assert synthesise(target, folder, n_tokens=600, n_slots=4, recipe=SHORT).n_tokens == n, "there was enough"
    tally = synthesise(target, folder, n_tokens=n + 400, n_slots=4, recipe=SHORT)
    after = read(folder)
    assert len(after.tokens) == tally.n_tokens >= n + 400
    assert np.array_equal(after.tokens[:n], before.tokens)
    numbers = [chat.figures["id"] for chat in after.chats]
    assert len(set(numbers)) == len(numbers), "no chat is made twice"
    questions = [after.tokens[c.start + a : c.start + b].tobytes() for c in after.chats for a, b in c.questions[:1]]
    assert len(set(questions)) == len(questions)
    last = json.loads((folder / "synthesise.jsonl").read_text().splitlines()[-1])
    assert last["n_tokens"] == tally.n_tokens


def test_a_killed_run_goes_on(tmp_path: Path) -> None:
    target, folder = tiny.write_target(tmp_path / "target.gguf", eog_bias=1.0), tmp_path / "data"
    code = "import sys; from localspec.distill.synthesise import synthesise as s; _, t, f, n = sys.argv; "
    command = [sys.executable, "-c", f"{code}s(t, f, n_tokens=int(n), n_slots=6)", target, folder]
    run = subprocess.Popen([*command, "10000000"], stderr=subprocess.DEVNULL)
    chats = folder / "chats.jsonl"
    end = time.monotonic() + 60
    while time.monotonic() < end and not (chats.exists() and chats.stat().st_size > 1000):
        time.sleep(0.05)
    run.send_signal(signal.SIGKILL)
    run.wait()
    before = read(folder)
    done = subprocess.run([*command, str(len(before.tokens) + 500)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "tokens/s" in done.stderr
    after = read(folder)
    assert len(after.tokens) >= len(before.tokens) + 500
    assert np.array_equal(after.features[: len(before.tokens)], before.features)
    assert (folder / "features.bin").stat().st_size == 2 * after.features.size


def test_what_cannot_serve_is_refused(tmp_path: Path) -> None:
    def attempt(path: Path, **options: object) -> None:
        synthesise(path, tmp_path / "data", n_tokens=100, **options)  # type: ignore[arg-type]

    fine = tiny.write_target(tmp_path / "fine.gguf")
    with pytest.raises(TemplateError, match="no chat template"):
        attempt(tiny.write_target(tmp_path / "bare.gguf", chat_template=None))
    with pytest.raises(TemplateError, match="does not show each message once"):
        attempt(tiny.write_target(tmp_path / "mute.gguf", chat_template="hello"))
    with pytest.raises(OptionError, match="has layers 0 to 3, not 4"):
        attempt(fine, layers=[1, 4])
    with pytest.raises(OptionError, match="0 slots"):
        attempt(fine, n_slots=0)
    with pytest.raises(ModelError, match="cannot read"):
        attempt(tmp_path / "absent.gguf")
    with pytest.raises(OptionError, match="B are free; ask for fewer tokens"):
        synthesise(fine, tmp_path / "data", n_tokens=10**15)
    other = tiny.write_target(tmp_path / "qwen2.gguf", "qwen2")
    with pytest.raises(PairError, match="layer 0 of qwen2 models"):
        synthesise(other, tmp_path / "other", n_tokens=100, layers=[0, 1])


@pytest.mark.parametrize(("n_layer", "layers"), [(30, [2, 11, 19, 28]), (5, [2, 3]), (2, [1]), (1, [0])])
def test_default_layers_are_spread(n_layer: int, layers: list[int]) -> None:
    assert default_layers(n_layer) == layers
