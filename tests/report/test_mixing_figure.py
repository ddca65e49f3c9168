"""The report's picture of moving weights: two charts over the same steps, with every move and refusal marked."""

from pathlib import Path

from tilewright.report.figures.mixing_figure import mixing_figure
from tilewright.report.run_data.collect_run import RunData


def events(number):
    for step in range(2, 2 * number, 2):
        domains = {
            name: {"weight": w, "loss": 3.0 - 0.01 * step, "epochs": 0.1} for name, w in (("a", 0.3), ("b", 0.7))
        }
        yield {"kind": "mix_eval", "step": step, "message": "", "domains": domains}
    yield {"kind": "mix", "step": 8, "message": "a 0.300 to 0.333"}
    yield {"kind": "mix_refused", "step": 12, "message": "b is not moved: it is overfitted"}


def test_weights_stand_over_perplexity_with_moves_and_refusals():
    figure = mixing_figure(RunData(Path("run"), "run", events=list(events(20))))
    assert figure.svg.count("<svg") == 2
    assert figure.svg.count("a 0.300 to 0.333") == figure.svg.count("it is overfitted") == 2
    assert [(name, value) for _, name, value in figure.legend] == [
        ("a", "30.0 %"), ("b", "70.0 %"), ("moves", "1 x"), ("refusals", "1 x"),
    ]  # fmt: skip


def test_a_run_without_mixing_has_none_and_damaged_rows_are_left_out():
    assert mixing_figure(RunData(Path("run"), "run")) is None
    bad = [{"kind": "mix_eval", "step": "x", "domains": {}}, {"kind": "mix_eval", "step": 2, "domains": [1]}]
    assert mixing_figure(RunData(Path("run"), "run", events=bad)) is None
    bad += [
        {"kind": "mix_eval", "step": 4, "domains": {"a": {"weight": 1.0, "loss": 1e9}, "b": {"loss": None}, "c": 3}}
    ]
    figure = mixing_figure(RunData(Path("run"), "run", events=bad))
    assert figure is not None
    assert "nats per token" in figure.svg
