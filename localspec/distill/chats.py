"""Chats that write themselves: what stands before a model's words, when a text is done, what is thrown away.

Pure bookkeeping over token ids; `synthesise` asks the model for the next one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from threading import Lock
from typing import Any

import numpy as np

from localspec.distill.store import Span
from localspec.errors import OptionError, TemplateError
from localspec.llama import Vocab
from localspec.planning.ngram import FAR, LAST
from localspec.template import ChatTemplate

# How a question may begin. A small model left alone asks much the same things; what it asks about is still its own.
# The empty ones at the end leave it everything.
OPENERS = """\
Write a Python function that|Write a short story about|Write a poem about|Write an email to|Write a SQL query
Write a JavaScript function|Write a C++ program that|Write a bash script to|Write a paragraph about|Write a dialogue
Explain|Explain the difference between|Explain to a child|What is|What are the|What would happen if|What does
Summarize the following text:|Summarize|How do I|How does|How can I|How many|Why do|Why is|When did|Who was|Where
Translate the following sentence to|Give me a list of|Give me an example of|Give me tips for|List the|Name five
Solve:|Calculate|If a train|A store sells|Prove that|Compare|Describe|Imagine|Pretend you are|You are a
Rewrite the following sentence|Correct the grammar|Classify the following|Extract the|Convert|Is it true that
Can you|Can you help me|I want to|I have a|I am writing|My|Please|Tell me about|Suggest|Create a|Design a|Plan a
Generate a|Complete the following|Fix the bug in this code:|Here is a|Given the following|In the|The|Do you|Should I
What's the best way to|Let's|Hello|Recommend|Make a table of|Draft a|Edit the following|Answer the question:|||||"""
MARKS = ("localspec-ask-1", "localspec-say-1", "localspec-ask-2")


@dataclass(frozen=True)
class Recipe:
    """What the chats are made of; lengths in tokens, shares from 0 to 1."""

    n_ctx: int = 768  # a chat has no more
    question_min: int = 4
    question_max: int = 120
    answer_max: int = 320
    question_temperature: float = 1.0
    answer_temperature: float = 0.8
    min_p: float = 0.05  # without it a small model's questions drift into nonsense
    sampled_share: float = 0.25  # answers at `answer_temperature`, the others at 0
    continued_share: float = 1 / 3  # of the chats whose first answer came to its end: a second question
    prompt_every: int = 8  # one chat in so many starts with a prompt from the file

    def __post_init__(self) -> None:
        if self.n_ctx < 2 * self.question_max:
            raise OptionError(
                f"chats of {self.n_ctx} tokens are too short for questions of {self.question_max}; "
                f"allow {2 * self.question_max} or more."
            )


@dataclass(frozen=True)
class Script:
    """The chat template as token ids: what stands before, between and after the texts of a chat."""

    head: list[int]  # before the first question
    reply: list[int]  # between a question and its answer
    again: list[int]  # between an answer and the next question

    @classmethod
    def of(cls, source: str | None, vocab: Vocab) -> Script:
        """Render the template around markers and cut it there. Raises TemplateError if it cannot be."""
        if not source:
            raise TemplateError(
                "this model has no chat template, so it cannot ask itself; give it prompts to continue with --prompts."
            )
        template = ChatTemplate(source, vocab)
        roles = ("user", "assistant", "user")
        rest = template.render([{"role": role, "content": mark} for role, mark in zip(roles, MARKS, strict=True)])
        pieces: list[list[int]] = []
        for mark in MARKS:
            piece, found, rest = rest.partition(mark)
            if not found or mark in rest:
                raise TemplateError("the model's chat template does not show each message once.")
            pieces.append(template.tokenize(piece))
        if vocab.add_bos and pieces[0][:1] != [vocab.bos]:
            pieces[0].insert(0, vocab.bos)
        return cls(*pieces)

    @classmethod
    def plain(cls, vocab: Vocab) -> Script:
        """For a model without chat template, which goes on with a prompt as with any text."""
        return cls([vocab.bos] if vocab.add_bos else [], [], [])


class Repeats:
    """Marks the tokens of one text whose last four tokens occurred in it before."""

    def __init__(self) -> None:
        self._seen: dict[tuple[int, ...], int] = {}
        self._tail: tuple[int, ...] = ()
        self._n = 0
        self.near: list[bool] = []  # within the last 64 tokens: the usual measure of repeating text
        self.ever: list[bool] = []

    def add(self, token: int) -> None:
        self._tail = (*self._tail, token)[-LAST:]
        before = self._seen.get(self._tail)
        self.ever.append(before is not None)
        self.near.append(before is not None and self._n - before <= FAR)
        if len(self._tail) == LAST:
            self._seen[self._tail] = self._n
        self._n += 1

    def excess(self, *, window: int = 96, share: float = 0.6, run: int = 32, keep: int = 16) -> int:
        """Tokens too many at the end of a text that runs in circles; 0 as long as it does not.

        It does when the last `run` tokens, or more than `share` of the last `window`, are repeats. Of the repeats at
        the end `keep` may stay: a drafter should know that there is such a thing.
        """
        all_of_run = len(self.ever) >= run and all(self.ever[-run:])
        most_of_window = len(self.ever) >= window and sum(self.ever[-window:]) > share * window
        if not (all_of_run or most_of_window):
            return 0
        tail = next((i for i, repeated in enumerate(reversed(self.ever)) if not repeated), len(self.ever))
        return max(tail - keep, 1)

    def cut(self, n: int) -> None:
        """Leave out the last `n` tokens of the text, which ends here."""
        del self.near[len(self.near) - n :], self.ever[len(self.ever) - n :]


@dataclass
class Setting:
    """What all chats of one run share. `script` is made by `setting`."""

    recipe: Recipe
    script: Script
    vocab: Vocab
    prompts: Sequence[str] = ()
    seed: int = 0
    seen: set[bytes] = field(default_factory=set)  # questions asked so far, as the bytes of their ids


def setting(template: str | None, vocab: Vocab, recipe: Recipe, prompts: Sequence[str], seed: int) -> Setting:
    """How a model speaks: in its chat template, asking itself and answering prompts; or, where it has none, going on
    with the prompts as plain text.

    Raises:
        TemplateError: there is no template and there are no prompts, or the template cannot be taken apart.
        OptionError: no prompt is of use.
    """
    if template or not prompts:
        return Setting(recipe, Script.of(template, vocab), vocab, prompts, seed)
    least, most = recipe.question_min, recipe.n_ctx - 2 * recipe.question_min
    if not any(least <= len(vocab.tokenize(prompt)) <= most for prompt in prompts):
        raise OptionError(f"none of the {len(prompts)} prompts has between {least} and {most} tokens; give others.")
    recipe = replace(recipe, prompt_every=1, continued_share=0.0)
    return Setting(recipe, Script.plain(vocab), vocab, prompts, seed)


class Chat:
    """One conversation in the making: its tokens so far, the last ones perhaps not decoded yet."""

    def __init__(self, number: int, setting: Setting) -> None:
        """Chat `number` of a run begins the same way whenever it is begun."""
        self.number, self._setting = number, setting
        self.rng = np.random.default_rng([setting.seed, number])
        self.tokens = [*setting.script.head]
        self.source = "self"
        self.temperature = 0.0  # of the text being written
        self.end = ""  # why nothing more is to be said; empty: go on
        self.questions: list[Span] = []
        self.answers: list[Span] = []
        self.temperatures: list[float] = []  # of the answers
        self.n_repeating = 0  # tokens of the answers
        self._start = len(self.tokens)  # of the text being written
        self._asking = True
        self._repeats = Repeats()
        turn, from_file = divmod(number, setting.recipe.prompt_every)
        if setting.prompts and not from_file:
            self._take_prompt(*divmod(turn, len(setting.prompts)))
        else:
            self._begin_question()

    @property
    def room(self) -> int:
        """Tokens it may still grow by."""
        return self._setting.recipe.n_ctx - len(self.tokens)

    def add(self, token: int) -> None:
        """Take the token the model chose next."""
        ended = self._setting.vocab.is_eog(token)
        if not ended:
            self.tokens.append(token)
            self._repeats.add(token)
        if self._asking:
            self._go_on_asking(ended)
        else:
            self._go_on_answering(token, ended)

    def figures(self) -> dict[str, Any]:
        """What is worth keeping beside the tokens."""
        return {
            "id": self.number,
            "source": self.source,
            "end": self.end,
            "temperatures": self.temperatures,
            "n_repeating": self.n_repeating,
        }

    # -- questions ----------------------------------------------------------------------------------------------------

    def _take_prompt(self, n_before: int, which: int) -> None:
        """Ask prompt `which` of the file; after the first time only a drawn answer can be new."""
        self.source = "file"
        self.tokens += self._setting.vocab.tokenize(self._setting.prompts[which])
        self._begin_answer(self._setting.recipe.answer_temperature if n_before else 0.0)

    def _begin_question(self) -> None:
        openers = OPENERS.replace("\n", "|").split("|")
        self.tokens += self._setting.vocab.tokenize(openers[self.rng.integers(len(openers))])
        self.temperature = self._setting.recipe.question_temperature
        self._asking, self._repeats = True, Repeats()

    def _go_on_asking(self, ended: bool) -> None:
        recipe = self._setting.recipe
        if self._repeats.excess():
            self._give_up("looping question")
        elif ended or len(self.tokens) - self._start >= recipe.question_max:
            drawn = self.rng.random() < recipe.sampled_share
            self._begin_answer(recipe.answer_temperature if drawn else 0.0)

    def _give_up(self, reason: str) -> None:
        """End before the question just asked, which leaves nothing if it was the first."""
        self.end = reason
        del self.tokens[self.answers[-1][1] if self.answers else 0 :]

    # -- answers ------------------------------------------------------------------------------------------------------

    def _begin_answer(self, temperature: float) -> None:
        question = np.array(self.tokens[self._start :], np.int32).tobytes()
        if reason := self._flaw(question, temperature):
            return self._give_up(reason)
        self._setting.seen.add(question)
        self.questions.append((self._start, len(self.tokens)))
        self.tokens += self._setting.script.reply
        self._start = len(self.tokens)
        self.temperature = temperature
        self._asking, self._repeats = False, Repeats()
        return None

    def _flaw(self, question: bytes, temperature: float) -> str:
        """Why a question is not to be asked; empty if it is."""
        if len(question) < 4 * self._setting.recipe.question_min:
            return "short question"
        if self.room - len(self._setting.script.reply) < self._setting.recipe.question_min:
            return "long question"
        told = question in self._setting.seen and not (self.source == "file" and temperature > 0)
        return "duplicate" if told else ""

    def _go_on_answering(self, token: int, ended: bool) -> None:
        if ended:
            self._end_answer("end", token)
        elif excess := self._repeats.excess():
            del self.tokens[len(self.tokens) - excess :]
            self._repeats.cut(excess)
            self._end_answer("loop")
        elif len(self.tokens) - self._start >= self._setting.recipe.answer_max or self.room <= 1:
            self._end_answer("length")

    def _end_answer(self, end: str, eog: int | None = None) -> None:
        if len(self.tokens) == self._start:
            self.questions.pop()
            return self._give_up("no answer")
        again = self._setting.script.again
        said = int(again[:1] == [eog])  # where the template ends an answer as the model did: a thing to predict
        self.tokens += again[:said]
        self.answers.append((self._start, len(self.tokens)))
        self.temperatures.append(self.temperature)
        self.n_repeating += sum(self._repeats.near)
        if end == "end" and self._wants_more():
            self.tokens += again[said:]
            self._start = len(self.tokens)
            return self._begin_question()
        self.end = end
        return None

    def _wants_more(self) -> bool:
        recipe = self._setting.recipe
        room = self.room > len(self._setting.script.again) + recipe.question_max + recipe.answer_max // 2
        return room and len(self.answers) == 1 and bool(self.rng.random() < recipe.continued_share)


class Chats(Iterator[Chat]):
    """Chats without end, from chat `number` on; several threads may ask."""

    def __init__(self, setting: Setting, number: int) -> None:
        self._setting, self._number = setting, number
        self._lock = Lock()

    def __next__(self) -> Chat:
        with self._lock:
            while True:
                chat = Chat(self._number, self._setting)
                self._number += 1
                if not chat.end:  # a prompt that was told before, or is too long
                    return chat
