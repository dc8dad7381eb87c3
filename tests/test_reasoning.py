"""Reasoning apart from the answer, however the text is cut; and a pair that thinks, on real llama.cpp."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Callable, Iterator
from typing import Any

import gguf
import pytest
import tiny
from click.testing import CliRunner
from fakes import EOG, FakeVocab

from localspec.answer import Result
from localspec.cli import answers
from localspec.cli.main import main
from localspec.engine.stats import Round
from localspec.loading.open import open_pair
from localspec.pair import Pair
from localspec.reasoning import TOKEN, Channels, ReasoningParser, channels_of, inline_tags
from localspec.text import Limits, TextStream

T = TOKEN
THINK = Channels(("<think>",), ("</think>",))
HARMONY = channels_of("<|start|><|channel|><|message|>", "")
CONTROL, USER_DEFINED = gguf.TokenType.CONTROL, gguf.TokenType.USER_DEFINED


def sorted_out(
    pieces: list[str], prompt: str, opening: str, channels: Channels | None, special: Any = ()
) -> tuple[str, str]:
    """(answer, reasoning) of a text that comes in `pieces`; nothing that was certain once is taken back."""
    assert channels
    parser = ReasoningParser.behind(prompt, opening, channels, special)
    answer = reasoning = ""
    for piece in pieces:
        parser.feed(piece)
        answer, reasoning = answer + parser.take_answer(), reasoning + parser.take_reasoning()
    parser.finish()
    return answer + parser.take_answer(), reasoning + parser.take_reasoning()


QWEN = "<|im_start|>assistant\n"
CASES = [
    # template's text, what the prompt ends with, what is said, answer, reasoning
    ("</think>", QWEN, "<think>\nwhy\n</think>\n\nHi <b>!", "Hi <b>!", "why"),
    ("</think>", QWEN, "\n<think>\n\n</think>\n\nHi", "Hi", ""),
    ("</think>", QWEN, " Hi <think>no</think>", " Hi <think>no</think>", ""),
    ("</think>", QWEN, "<thinker>", "<thinker>", ""),
    ("</think>", QWEN, "<thi", "<thi", ""),
    ("</think>", QWEN + "<think>\n", "so\n\nit </thin is\n </think>\n\n  code\n", "  code\n", "so\n\nit </thin is"),
    ("</think>", QWEN + "<think>\n", "and on", "", "and on"),
    ("</think>", QWEN + "<think>\n", "a </think", "", "a </think"),
    ("</think>", QWEN + "<think>\n\n</think>\n\n", "  Hi", "  Hi", ""),
    ("</think>", QWEN + "<think>\n</think>", "\n\nHi", "Hi", ""),
    ("<seed:think></seed:think>", "assistant\n", "<seed:think>a</seed:think>Hi", "Hi", "a"),
    ("</mm:think>", "ai\n<mm:think>", "a</mm:think>Hi", "Hi", "a"),
    ("</think{}>", "A<think:open>", "a</think:open>Hi", "Hi", "a"),
    ("[THINK][/THINK]", "[/INST]", "[THINK]a[/THINK]Hi", "Hi", "a"),
    ("<response></response></think>", "role>", "<think>a</think> <response>Hi</response>", "Hi", "a"),
    ("[BEGIN FINAL RESPONSE]", "Here are my reasoning steps:\n", "a\n[BEGIN FINAL RESPONSE]\nHi", "Hi", "a"),
    (
        "<|START_THINKING|>",
        "BOT|>",
        "<|START_THINKING|>a<|END_THINKING|><|START_RESPONSE|>Hi<|END_RESPONSE|>",
        "Hi",
        "a",
    ),
    ("<|START_THINKING|>", "<|START_THINKING|><|END_THINKING|>", "Hi", "Hi", ""),
    ("<|channel>thought<channel|>", "<|turn>model\n", "<|channel>thought\na\n<channel|>Hi", "Hi", "a"),
    ("<|inner_prefix|>", "<|assistant_start|>", "<|inner_prefix|>a<|inner_suffix|>Hi", "Hi", "a"),
    (
        "<|open|><|close|><|sep|>",
        "<|open|>think<|sep|>",
        "a<|close|>think<|sep|><|open|>response<|sep|>Hi<|close|>response<|sep|><|close|>message<|sep|>",
        "Hi",
        "a",
    ),
    (
        "<|begin|><|think|><|content|>",
        "<|begin|>assistant",
        "<|think|>a<|end|><|begin|>assistant<|content|>Hi",
        "Hi",
        "a",
    ),
    (
        "<|start|><|message|>",
        "<|start|>assistant",
        "<|channel|>analysis<|message|>a\n<|end|><|start|>assistant<|channel|>final<|message|> Hi",
        " Hi",
        "a",
    ),
    (
        "<|start|><|message|>",
        "<|start|>assistant",
        "<|channel|>analysis<|message|>a<|end|><|start|>assistant<|channel|>commentary<|message|>Look.<|end|>"
        "<|start|>assistant<|channel|>analysis<|message|>b<|end|><|start|>assistant<|channel|>final<|message|>Hi",
        "Look.\nHi",
        "a\nb",
    ),
    (
        "<|start|><|message|>",
        "<|start|>assistant",
        "<|channel|>commentary to=functions.f <|constrain|>json<|message|>{}<|end|>",
        "",
        "{}",
    ),
    (
        "<|start|><|message|>",
        "<|start|>assistant",
        " to=self<|message|>a<|eom|><|start|>assistant to=user<|message|>Hi",
        "Hi",
        "a",
    ),
    ("<|start|><|message|>", "<|start|>assistant", "Hi, no header", "Hi, no header", ""),
]


@pytest.mark.parametrize(("source", "prompt", "said", "answer", "reasoning"), CASES)
def test_reasoning_is_told_from_the_answer_wherever_the_text_is_cut(
    source: str, prompt: str, said: str, answer: str, reasoning: str
) -> None:
    channels = channels_of(source, prompt)
    for cut in range(len(said) + 1):
        assert sorted_out([said[:cut], said[cut:]], prompt, prompt, channels) == (answer, reasoning)
    for width in (1, 2, 3, 7):
        pieces = [said[i : i + width] for i in range(0, len(said), width)]
        assert sorted_out(pieces, prompt, prompt, channels) == (answer, reasoning)


def test_the_cuts_of_any_text_change_nothing() -> None:
    for seed in range(400):
        rng = random.Random(seed)
        source, prompt, *_ = rng.choice(CASES)
        channels = channels_of(source, prompt)
        assert channels
        words = [*channels.marks, *"<|>/", " ", "\n", "a", "thi", "analysis", "to=self"]
        said = "".join(rng.choices(words, k=40))
        whole = sorted_out([said], prompt, prompt, channels)
        for _ in range(5):
            cuts = sorted(rng.choices(range(len(said)), k=rng.randrange(1, 30)))
            pieces = [said[a:b] for a, b in itertools.pairwise([0, *cuts, len(said)])]
            assert sorted_out(pieces, prompt, prompt, channels) == whole, (seed, said, pieces)


@pytest.mark.parametrize(
    "source", ["{{ messages }}", "a template that thinks", "</thinking_instructions>", "<|start|>"]
)
def test_a_template_without_marks_has_no_channels(source: str) -> None:
    assert channels_of(source, "assistant\n") is None


def test_what_does_not_follow_a_chat_is_answer_as_it_comes() -> None:
    said = "<think>a</think>"
    assert sorted_out([said], "Once upon a time", QWEN, THINK) == (said, "")
    assert sorted_out([said], f"spaces are SentencePiece's: {QWEN} ", QWEN, THINK) == ("", "a")
    parser = ReasoningParser()
    parser.feed(said)
    assert parser.take_answer() == said


def test_a_name_spelt_out_is_not_its_token() -> None:
    """Where the vocabulary has a token for a mark, only the token counts: a model may write about `</think>`."""
    special = ("<think>", "</think>", "<|im_end|>")
    assert THINK.tokens(special) == {"<think>", "</think>"}
    assert sorted_out(["<think> is a tag"], QWEN, QWEN, THINK, special) == ("<think> is a tag", "")
    said = [f"{T}<think>", "it ends at </think>, not here", f"{T}</think>", "Hi </think>"]
    assert sorted_out(said, QWEN, QWEN, THINK, special) == ("Hi </think>", "it ends at </think>, not here")
    again = [f"{T}<think>a", f"{T}</think>Hi", f"{T}<think>b", f"{T}</think>Ho"]  # a token opens it at any place
    assert sorted_out(again, QWEN, QWEN, THINK, special) == ("HiHo", "a\nb")
    gemma = channels_of("<|channel><channel|>", "")
    said = [f"{T}<|channel>", "thought", "\na", f"{T}<channel|>", "Hi"]
    assert sorted_out(said, "model\n", "model\n", gemma, ("<|channel>", "<channel|>")) == ("Hi", "a")


def test_templates_look_for_tags_in_old_answers() -> None:
    assert inline_tags(THINK) == ("<think>", "</think>")
    assert inline_tags(HARMONY) == inline_tags(None) == ()


# --- the stream


def stream_of(text: str, **limits: Any) -> tuple[str, str, TextStream]:
    """Answer, reasoning and stream of a text that comes byte by byte behind an open thought."""
    data = text.encode()
    vocab = FakeVocab([b"", *(data[i : i + 1] for i in range(len(data)))])
    parser = ReasoningParser.behind("<think>\n", "", THINK, ())
    stream = TextStream(vocab, Limits(**limits), parser)
    answer = reasoning = ""
    for token in [*range(1, len(data) + 1), EOG]:
        stream.clip([token])
        answer, reasoning = answer + stream.text(), reasoning + stream.reasoning()
        if stream.finish_reason:
            break
    answer += stream.flush()
    return answer, reasoning + stream.reasoning(), stream


def test_stop_strings_are_looked_for_in_the_answer_only() -> None:
    answer, reasoning, stream = stream_of("one STOP two</think>\nthree STOP four", stop=("STOP", "</think>"))
    assert (answer, reasoning, stream.finish_reason) == ("three ", "one STOP two", "stop")


def test_a_stop_string_is_found_in_what_was_held_back() -> None:
    answer, _, stream = stream_of("a</think>\n  ", stop=(" ",))
    assert (answer, stream.finish_reason) == ("", "stop")


def test_the_limit_counts_what_was_thought() -> None:
    answer, reasoning, stream = stream_of("né 🙂 so</think>Hi", max_tokens=8)
    assert (answer, reasoning, stream.finish_reason) == ("", "né 🙂", "length")


# --- a pair that thinks

HARMONY_TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'assistant' %}"
    "{% if '<|channel|>' in m.content %}{{ raise_exception('no channels in a content') }}{% endif %}"
    "<|start|>assistant<|channel|>final<|message|>{{ m.content }}<|end|>"
    "{% else %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)
THOUGHTS_TEMPLATE = (  # keeps thoughts as they were
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.reasoning_content is defined %}"
    "<think>\n{{ m.reasoning_content }}\n</think>\n\n{% endif %}{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
)
GPT_OSS = dict.fromkeys(("<|start|>", "<|message|>", "<|channel|>", "<|end|>", "<|return|>", "<|call|>"), CONTROL)
QWEN_TOKENS = dict.fromkeys(("<think>", "</think>"), USER_DEFINED)
ANALYSIS = "<|channel|>analysis<|message|>the sea?<|end|><|start|>assistant<|channel|>final<|message|>"


@pytest.fixture(scope="module")
def load(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str, dict[str, Any]], Pair]]:
    """Pairs without drafter, by template and special tokens."""
    folder, pairs = tmp_path_factory.mktemp("thinkers"), list[Pair]()

    def one(template: str, special: dict[str, Any]) -> Pair:
        path = folder / f"{len(pairs)}.gguf"
        tiny.write_target(path, chat_template=template, overrides=tiny.vocabulary_with(special))
        pairs.append(open_pair(path, n_ctx=512, n_threads=1))
        return pairs[-1]

    yield one
    for pair in pairs:
        pair.close()


@pytest.fixture
def say(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[list[int]]]:
    """Makes any pair say given texts one after the other, a token a round; the prompts it read are returned."""

    def script(pair: Pair, *texts: str) -> list[list[int]]:
        prompts: list[list[int]] = []
        left = iter(texts)
        begin = pair.engine.start

        def start(ids: list[int], **options: Any) -> Any:
            prompts.append(list(ids))
            return begin(ids, **options)

        def generate(engine: Any, *, plan: Any, sampler: Any, clip: Any) -> Iterator[Round]:
            for token in pair.vocab.tokenize(next(left), parse_special=True):
                _, ended = clip([token])
                yield Round([token], 0, 0)
                if ended:
                    return

        monkeypatch.setattr(pair.engine, "start", start)
        monkeypatch.setattr("localspec.pair.generate", generate)
        return prompts

    return script


def test_gpt_oss_speaks_in_channels_turn_after_turn(load: Any, say: Any) -> None:
    pair = load(HARMONY_TEMPLATE, GPT_OSS)
    prompts = say(pair, f"{ANALYSIS}the sea<|return|>", f"{ANALYSIS}in it<|return|>")
    chat = pair.chat()
    chunks = list(chat.stream("what is <|start|>?"))
    assert "".join(chunk.text for chunk in chunks) == "the sea"
    assert "".join(chunk.reasoning for chunk in chunks) == "the sea?"
    second = chat.send("where?")
    assert (second.text, second.reasoning, second.finish_reason) == ("in it", "the sea?", "stop")
    assert chat.messages[1] == {"role": "assistant", "content": "the sea", "reasoning_content": "the sea?"}
    rendered = "".join(pair.vocab.text(token) for token in prompts[1]).replace("Ġ", " ")
    assert rendered.endswith(
        "<|end|><|start|>assistant<|channel|>final<|message|>the sea<|end|><|start|>user<|message|>where?<|end|>"
        "<|start|>assistant"
    )


def test_a_thought_that_the_template_keeps_is_not_read_again(load: Any, say: Any) -> None:
    pair = load(THOUGHTS_TEMPLATE, QWEN_TOKENS)
    said = "the t" + "he sea\n</think>\n\nin it"
    prompts = say(pair, f"{said}<|im_end|>", "x")
    chat = pair.chat()
    first = chat.send("where?")
    assert (first.text, first.reasoning) == ("in it", "the the sea")
    chat.send("what?")
    words = [token for token in first.tokens if not pair.vocab.is_eog(token)]
    assert prompts[1][: len(prompts[0]) + len(words)] == prompts[0] + words
    assert prompts[1] == pair.template.tokenize(pair.template.render(chat.messages[:3]))


@pytest.mark.parametrize("stop", ["it", " it", "n i", "in"])
def test_what_a_stop_string_cut_off_is_not_read_again(load: Any, say: Any, stop: str) -> None:
    pair = load(THOUGHTS_TEMPLATE, QWEN_TOKENS)
    prompts = say(pair, "the sea\n</think>\n\nin it and more", "x")
    chat = pair.chat()
    first = chat.send("where?", stop=stop)
    assert first.text == "in it".partition(stop)[0]
    assert first.finish_reason == "stop"
    chat.send("what?")
    spoken = b"".join(map(pair.vocab.piece, prompts[1])).decode()
    assert (
        spoken
        == f"user\nwhere?\nassistant\n<think>\nthe sea\n</think>\n\n{first.text}\nuser\nwhat?\nassistant\n<think>\n"
    )


def test_a_thought_cut_short_is_a_turn_too(load: Any, say: Any) -> None:
    pair = load(THOUGHTS_TEMPLATE, QWEN_TOKENS)
    prompts = say(pair, "the sea, the sea", "x")
    chat = pair.chat()
    first = chat.send("where?", max_tokens=3)
    assert (first.text, bool(first.reasoning), first.finish_reason) == ("", True, "length")
    chat.send("what?")
    assert prompts[1] == pair.template.tokenize(pair.template.render(chat.messages[:3]))


def test_raw_text_is_continued_as_it_is(load: Any, say: Any) -> None:
    pair = load(HARMONY_TEMPLATE, GPT_OSS)
    say(pair, "the sea")
    assert pair.generate(pair.vocab.tokenize("once upon")).text == "the sea"


# --- the command line


def test_json_and_pipes_keep_them_apart(load: Any, say: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    pair = load(THOUGHTS_TEMPLATE, QWEN_TOKENS)
    monkeypatch.setattr("localspec.cli.open.open_pair", lambda model: pair)
    monkeypatch.setattr(pair, "close", lambda: None)
    for options in ((), ("--json",), ("-n", "3")):
        say(pair, "the sea\n</think>\n\nin it<|im_end|>")
        done = CliRunner().invoke(main, ["run", "-p", "where?", *options])
        assert done.exit_code == 0
        if "-n" in options:
            assert (done.stdout, done.stderr.split(": ")[-1]) == ("\n", "the model was still thinking\n")
            continue
        assert done.stderr == ""
        if options:
            answer = json.loads(done.stdout)
            assert (answer["text"], answer["reasoning"]) == ("in it", "the sea")
        else:
            assert done.stdout == "in it\n"


def test_a_terminal_shows_thoughts_dimmed_before_the_answer(
    load: Any, say: Any, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    pair = load(THOUGHTS_TEMPLATE, QWEN_TOKENS)
    say(pair, "the sea\n</think>\n\nin it<|im_end|>")
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    result: Result = answers.show(pair.stream("where?"))
    shown = capsys.readouterr()
    assert shown.out == result.text == "in it"
    assert "\x1b[2m" in shown.err
    assert shown.err.endswith("\n\n")
    assert shown.err.replace("\x1b[2m", "").replace("\x1b[0m", "").strip() == "the sea"
