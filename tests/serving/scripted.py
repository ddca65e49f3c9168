"""A model that says the ids that it is given, and sessions with it."""

from collections.abc import Sequence

import torch
from torch import nn

from tilewright.data.chat.template import ChatTemplate
from tilewright.data.common.tokenizer import Tokenizer
from tilewright.serving.session import Session

PROMPT = (1, 2, 3)


class Scripted(nn.Module):
    """After a prompt of `prompt` ids comes the script, and then its last id for ever."""

    def __init__(self, script: Sequence[int], vocab_size: int, prompt: int):
        super().__init__()
        self.script, self.vocab_size, self.prompt, self.notes = list(script), vocab_size, prompt, []

    def new_cache(self, rows, length):
        return None

    def next_token_logits(self, input_ids_BS, cache=None):
        at = min(input_ids_BS.shape[1] - self.prompt, len(self.script) - 1)
        return nn.functional.one_hot(torch.tensor([self.script[at]]), self.vocab_size).float()


def scripted(
    script: Sequence[int], tokenizer: Tokenizer, template: ChatTemplate | None = None, prompt: int = len(PROMPT)
) -> Session:
    """A session with a model that says `script`."""
    model = Scripted(script, tokenizer.vocab_size, prompt)
    return Session(model, tokenizer, template, torch.device("cpu"))
