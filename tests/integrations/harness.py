"""Local tasks of both kinds, and models in folders, for tests of the harness."""

import json
from pathlib import Path

QUESTIONS = [
    {"question": f"hello {a} and {b}?", "choices": ["Yes, the weather!", "Paris", f"no {a}"], "answer": i % 3}
    for i, (a, b) in enumerate([("Paris", "system"), ("weather", "answers"), ("Zürich", "äöü"), ("你好", "questions")])
]

CHOICE = """\
task: local_choice
dataset_path: json
dataset_kwargs: {{data_files: {{test: "{data}"}}, cache_dir: "{data}.cache"}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: answer
metric_list:
  - {{metric: acc, aggregation: mean, higher_is_better: true}}
metadata: {{version: 2.0}}
"""

WRITE = """\
task: local_write
dataset_path: json
dataset_kwargs: {{data_files: {{test: "{data}"}}, cache_dir: "{data}.cache"}}
test_split: test
output_type: generate_until
doc_to_text: "{{{{question}}}}"
doc_to_target: "{{{{choices[0]}}}}"
generation_kwargs: {{until: ["\\n\\n", "?"], max_gen_toks: 12, do_sample: false}}
metric_list:
  - {{metric: exact_match, aggregation: mean, higher_is_better: true}}
metadata: {{version: 1.0}}
"""


def make_tasks(folder: Path) -> Path:
    """A folder with `local_choice` and `local_write` over four questions."""
    folder.mkdir(parents=True, exist_ok=True)
    data = folder / "questions.jsonl"
    data.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in QUESTIONS), encoding="utf-8")
    (folder / "choice.yaml").write_text(CHOICE.format(data=data))
    (folder / "write.yaml").write_text(WRITE.format(data=data))
    return folder
