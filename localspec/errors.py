"""Every error a user can cause, as one small tree: catch `LocalspecError` to catch them all."""

from __future__ import annotations


class LocalspecError(Exception):
    """Base of all errors localspec raises on purpose; `str(error)` is one sentence for the user."""


class OptionError(LocalspecError):
    """An option or argument has a value that cannot be honoured."""


class MissingError(LocalspecError):
    """Something that is needed is not on this machine; the message says how to get it."""


class BackendError(LocalspecError):
    """llama-cpp-python is missing, of another version, or failed inside a call."""


class ModelError(LocalspecError):
    """A file is not a model that can take the role it was given."""


class PairError(LocalspecError):
    """Target and drafter are both fine, but not for each other."""


class TemplateError(LocalspecError):
    """The chat template is missing, broken, or refuses these messages."""


class LocalspecWarning(UserWarning):
    """Something is not as good as it could be; one sentence, like an error's."""
