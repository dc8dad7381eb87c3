"""What an answer begins with: a text, messages or token ids, made into token ids that a target can read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from localspec.errors import OptionError, TemplateError
from localspec.llama import Vocab
from localspec.template import ChatTemplate, Message
from localspec.text import encode_plain

Prompt = str | Sequence[Message] | Sequence[int]


def encode(prompt: Prompt, vocab: Vocab, template: ChatTemplate | None, model: str) -> list[int]:
    """Token ids of a prompt for the model of that name.

    A text is one user turn where there is a template, else it is continued as plain text. Raises OptionError for what
    is no prompt, TemplateError for messages that the template refuses or where there is none.
    """
    if isinstance(prompt, str):
        if template is None:
            return encode_plain(vocab, prompt)
        prompt = [{"role": "user", "content": prompt}]
    if not isinstance(prompt, Sequence):
        raise OptionError(f"a prompt is a text, a list of messages, or a list of token ids, not {prompt!r}.")
    tokens = [token for token in prompt if isinstance(token, int)]
    messages = [message for message in prompt if isinstance(message, Mapping)]
    if isinstance(prompt, bytes) or len(tokens) + len(messages) < len(prompt) or (tokens and messages):
        raise OptionError("a prompt is a text, a list of messages, or a list of token ids, nothing else.")
    if not messages:
        return tokens
    template = need_template(template, model)
    return template.tokenize(template.render(messages))


def need_template(template: ChatTemplate | None, model: str) -> ChatTemplate:
    """The chat template; TemplateError if the model of that name has none."""
    if template is None:
        raise TemplateError(f"{model} has no chat template, so it cannot chat; use `localspec run` with plain text.")
    return template


def check(ids: Sequence[int], *, n_ctx: int, n_vocab: int) -> None:
    """Raise OptionError for no tokens, more than `n_ctx`, or one that the vocabulary does not have."""
    if not ids:
        raise OptionError("the prompt is empty; give at least one token.")
    if len(ids) > n_ctx:
        raise OptionError(f"the prompt has {len(ids):,} tokens, the context {n_ctx:,}; shorten it or raise n_ctx (-c).")
    if bad := [token for token in ids if not 0 <= token < n_vocab]:
        raise OptionError(f"token {bad[0]} is outside the vocabulary of {n_vocab:,} tokens.")
