"""The error of a conversation that cannot be used."""

from tilewright.core.errors import DataError


class TemplateTooMuchError(DataError):
    """A template that takes more time or memory than it gets."""


class ChatError(DataError):
    """A row that is no conversation, one that a template cannot render, or whose answers cannot be found in what it
    renders."""

    @property
    def reason(self) -> str:
        """Why a chat cannot be used, the same for all conversations of the kind."""
        return self.problems[0].what
