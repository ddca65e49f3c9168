"""Errors as OpenAI's API tells them."""

from typing import Any


class ApiError(Exception):
    """An answer of status 4xx or 5xx.

    Args:
        status: of HTTP.
        message: for people.
        param: the field that is wrong.
        code: for programs.
        retry_after: seconds.
    """

    def __init__(
        self, status: int, message: str, param: str | None = None, code: str | None = None, retry_after: int = 0
    ):
        super().__init__(message)
        self.status, self.message, self.param, self.code, self.retry_after = status, message, param, code, retry_after

    def to_json(self) -> dict[str, Any]:
        """An API error as OpenAI's object."""
        kinds = {401: "authentication_error", 429: "rate_limit_error"}
        kind = kinds.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}
