"""Programs that measure, each with the claim that its result decides. `python -m benchmarks.FOLDER.NAME --help`.

Folders are themes; `results` has what was measured, `rows` what docs/benchmarks.md says of it. All programs share:

common       the machine, spreads, deadlines, the writer of results, parsers of the command line
turns        functions that take turns in one process
worker       contenders in processes of their own, which end, or take turns
kept_rows    rows and cases that outlive a call
run_command  `tilewright train` as a user starts it, and what its folder says
loops        training loops that are compared: ours without a run around it, Hugging Face's

A study whose question is answered leaves its result, its rows (`rows/claims.toml`) and a line of docs/log.md;
`removed.toml` names the last commit that has its program.
"""
