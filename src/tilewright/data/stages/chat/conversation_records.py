"""Records of conversations: the text of one is what is said in it, and its fact `conversation` is the row.

Rules, filters, scores and the search for copies look at the text; what is trained is rendered from the row.
"""

import json
from dataclasses import replace

from tilewright.data.chat.chat_rows import PREFERENCES, TABLES, RowReader, said
from tilewright.data.chat.errors import ChatError
from tilewright.data.chat.messages import Row
from tilewright.data.common.records import Record, Rejected

CONVERSATION = "conversation"
"""Name of the fact."""
_BETWEEN = "\0"


class ConversationReader:
    """Makes records of conversations out of records of rows of JSON.

    Args:
        format: `chat.format`.

    Example:
        >>> row = '{"prompt": "How far is it?", "completion": "A mile."}'
        >>> found = ConversationReader("chat").converted(Record("", "text", "talk", row, path="a.jsonl"))
        >>> found.text
        'How far is it?\\nA mile.'
        >>> json.loads(found.facts["conversation"])["messages"][0]
        {'role': 'user', 'content': 'How far is it?'}
    """

    def __init__(self, format: str):
        self._rows = RowReader(pairs=format == PREFERENCES)

    def converted(self, record: Record) -> Record | Rejected:
        """The record converted from a conversation's row, or why that is none."""
        files = (record.path, *record.part.split(" > "))
        try:
            row = self._rows.read(record.path, record.text, of_table=any(name.endswith(TABLES) for name in files))
        except ChatError as error:
            problem, size = error.problems[0], len(record.text.encode())
            place = (record.path, record.part, "read", problem.what, problem.got, "")
            return Rejected(*place, record.text, record.domain, 1, size, record.id)
        facts = {**record.facts, CONVERSATION: json.dumps(row, ensure_ascii=False)}
        return replace(record, text=said(row), facts=facts)

    def counts(self) -> dict[str, dict[str, int]]:
        """Counts of conversations' rows by file and shape (`shapes_by_file`), and fields that are not read by how many
        rows have them."""
        shapes = self._rows.shapes.items()
        found = {f"{file}{_BETWEEN}{shape}": number for file, by in shapes for shape, number in by.items()}
        return {"shapes": found, "not_read": dict(self._rows.not_read)}


def shapes_by_file(counts: dict[str, int]) -> dict[str, dict[str, int]]:
    """Rows of conversations of each file by shape, from the count `shapes`."""
    found: dict[str, dict[str, int]] = {}
    for name, number in counts.items():
        file, _, shape = name.rpartition(_BETWEEN)
        found.setdefault(file, {})[shape] = number
    return found


def conversation_of(facts: str) -> Row:
    """The conversation of a record: its row, by its facts as JSON.

    Example:
        >>> conversation_of('{"conversation": "{\\\\"messages\\\\": []}"}')
        {'messages': []}
    """
    return json.loads(row_of_facts(facts))


def row_of_facts(facts: str) -> str:
    """The conversation of a record as it is written: all that is trained on."""
    return json.loads(facts)[CONVERSATION]
