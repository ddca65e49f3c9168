"""Every setting is read and has an effect: a short run with it and one without differ in what it is there for.

A setting without a row here fails. Where one small CPU run cannot show it, the row names the test that does.
"""

import re
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.contracts.observe import fixed_ceilings, observe, write_llama, write_texts
from tilewright.core.config import setting_names
from tilewright.core.config.section import EVERY
from tilewright.core.config.sections.data import MixingSection
from tilewright.core.config.sections.precision import PrecisionRule

ROOT = Path(__file__).resolve().parents[2]

# What all runs share: seconds of CPU in all, no compilation.
BASE = {
    "run.device": "cpu",
    "run.threads": "1",
    "run.name": "probe",
    "model.dim": "16",
    "model.num_layers": "2",
    "model.num_heads": "2",
    "model.ffn_dim": "32",
    "data.seq_len": "16",
    "data.vocab_size": "300",
    "data.prefetch": "0",
    "train.steps": "3",
    "train.global_batch_size": "4",
    "train.micro_batch_size": "2",
    "train.compile": "off",
    "train.log_interval": "1",
    "train.eval_interval": "0",
    "train.eval_batches": "1",
    "train.sample_tokens": "0",
    "checkpoint.interval": "0",
    "log.report": "false",
    "optim.warmup_steps": "0",
    "ops.cross_entropy": "ref",
    "ops.adam": "ref",
    "precision.mode": "fp32",
}
MLA = {"model.attention": "mla", "model.q_lora_rank": "8", "model.kv_lora_rank": "8"}
MLA |= {"model.qk_nope_head_dim": "8", "model.qk_rope_head_dim": "4", "model.v_head_dim": "8"}
MOE = {"model.num_experts": "4", "model.expert_dim": "16"}
FP16 = {"precision.mode": "hybrid", "precision.rules": '[{ match = "*", op = "linear", compute = "fp16" }]'}
FP16 |= {"precision.loss_scale": "1024"}
FP8 = {"precision.mode": "fp8_tile"}
CONTROL = {"precision.mode": "fp8_tile", "precision.controller.enabled": "true", "precision.controller.interval": "2"}
CONTROL |= {"precision.controller.recalibrate_interval": "2"}
UNTIL = {"precision.mode": "fp8_tile", "precision.fp8_until": "0.34"}
SWITCH = {"precision.start_mode": "bf16_mixed", "precision.start_fraction": "0.34"}
ROWS = {"data.source": "rows.jsonl"}
TALKS = {"data.source": "talks.jsonl", "data.seq_len": "128"}
SLICES = {"memory.executor": "layer_major"}
LLAMA = {"model.path": "llama"}


@dataclass(frozen=True)
class Probe:
    """`value` of the setting changes `sees` of a run that has BASE and `given`."""

    value: str
    sees: str
    given: dict[str, str] = field(default_factory=dict)


_CONTROLLER = "tests/training/test_controller_run.py::test_settings_of_the_controller"

_ENERGY = "tests/training/test_energy_run.py"
_STAGES = "tests/training/test_pipeline_run.py::test_it_is_the_run_of_one_process"
_PLACES = "tests/training/test_expert_places.py::test_a_run_whose_experts_move_is_the_one_in_which_they_stay"
_SHARDED = "tests/training/test_ranks_run.py::test_options_of_a_sharded_model"

_FAR = "tests/data/remote"
_MIXING, _MIXED = "tests/data/test_mixing_settings.py", "tests/training/test_mixing_run.py"
PROOFS: dict[str, Probe | str] = {
    "run.name": Probe("other", "path"),
    "run.dir": Probe("elsewhere", "path"),
    "run.seed": Probe("7", "weights"),
    "run.device": "tests/core/test_hardware.py::test_cuda_that_is_not_there_says_why",
    "run.threads": Probe("2", "threads"),
    "model.kind": Probe("hf", "weights", LLAMA),
    "model.path": Probe("llama", "weights"),
    "model.weights": Probe("load", "error", LLAMA),
    "model.task": Probe("masked_lm", "error", LLAMA | {"model.kind": "hf"}),
    "model.dim": Probe("32", "weights"),
    "model.num_layers": Probe("1", "weights"),
    "model.num_heads": Probe("4", "weights"),
    "model.num_kv_heads": Probe("1", "weights"),
    "model.head_dim": Probe("4", "weights"),
    "model.ffn_dim": Probe("64", "weights"),
    "model.layers": Probe("[{ ffn_dim = 64 }, { num_heads = 0 }]", "weights"),
    "model.sliding_window": Probe("3", "weights"),
    "model.rope_theta": Probe("5.0", "weights"),
    "model.norm_eps": Probe("0.1", "weights"),
    "model.tie_embeddings": Probe("false", "weights"),
    "model.init_std": Probe("0.05", "weights"),
    "model.attention": Probe("mla", "weights"),
    "model.q_lora_rank": Probe("4", "weights", MLA),
    "model.kv_lora_rank": Probe("4", "weights", MLA),
    "model.qk_nope_head_dim": Probe("4", "weights", MLA),
    "model.qk_rope_head_dim": Probe("8", "weights", MLA),
    "model.v_head_dim": Probe("4", "weights", MLA),
    "model.num_experts": Probe("8", "weights", MOE),
    "model.num_experts_per_token": Probe("1", "weights", MOE),
    "model.num_shared_experts": Probe("2", "weights", MOE),
    "model.expert_dim": Probe("8", "weights", MOE),
    "model.num_dense_layers": Probe("0", "weights", MOE),
    "model.num_expert_groups": Probe("2", "weights", MOE | {"model.num_experts_per_token": "1"}),
    "model.num_limited_groups": Probe("2", "weights", MOE | {"model.num_expert_groups": "2"}),
    "model.routed_scaling": Probe("2.0", "weights", MOE),
    "model.balance_rate": Probe("0.1", "weights", MOE),
    "data.source": Probe("texts/code", "data"),
    "data.format": Probe("chat", "error", TALKS | {"data.chat_template": "chatml"}),
    "data.sources": Probe('{ one = "texts/code", two = "rows.jsonl" }', "data"),
    "data.chat_template": Probe("chatml", "error", TALKS | {"data.format": "chat"}),
    "data.domains": Probe('["code"]', "data"),
    "data.weights": Probe("{ code = 1.0 }", "weights"),
    "data.max_bytes": Probe("9000", "data"),
    "data.holdout": Probe("0.3", "data"),
    "data.eval_source": Probe("rows.jsonl", "others"),
    "data.seq_len": Probe("32", "data"),
    "data.rows": Probe("documents", "data"),
    "data.vocab_size": Probe("310", "data"),
    "data.tokenizer": Probe("nowhere", "error"),
    "data.text_field": Probe("other", "data", ROWS),
    "data.image_size": "tests/data/test_images.py::test_prepare_and_stream",
    "data.cache_dir": Probe("another_cache", "siblings", {"run.dir": "."}),
    "data.prefetch": "tests/data/test_stream.py::test_prefetch_changes_nothing_but_time",
    "precision.enabled": Probe("false", "precision", {"precision.mode": "bf16_mixed"}),
    "precision.mode": Probe("bf16_mixed", "precision"),
    "precision.start_mode": Probe("bf16_mixed", "events"),
    "precision.start_fraction": Probe("0.67", "events", SWITCH),
    "precision.rules": Probe('[{ match = "*o_proj", compute = "fp16" }]', "precision"),
    "precision.fp32_ops": Probe('["linear"]', "precision", {"precision.mode": "bf16_mixed"}),
    "precision.loss_scale": Probe("512", "steps", FP16),
    "precision.loss_scale_window": Probe("1", "steps", FP16),
    "precision.loss_scale_min": Probe("16777216", "error", FP16 | {"precision.loss_scale": "16777216"}),
    "precision.loss_scale_max": Probe("1024", "steps", FP16 | {"precision.loss_scale_window": "1"}),
    "precision.fp8_scale": Probe("fp32", "weights", FP8),
    "precision.fp8_min_gain": "tests/precision/test_policy.py",
    "precision.strict": "tests/precision/test_convert.py",
    "precision.bf16_grad_layers": Probe("[]", "precision", FP8),
    "precision.fp8_from": Probe("[0.0, 0.4, 0.7]", "weights", FP8),
    "precision.fp8_until": Probe("0.5", "weights", FP8),
    "precision.fp8_after": Probe("fprop", "weights", UNTIL),
    "precision.controller.enabled": Probe("true", "files", FP8),
    "precision.controller.granularity": _CONTROLLER,
    "precision.controller.budget": Probe("0.01", "error", CONTROL),
    "precision.controller.interval": _CONTROLLER,
    "precision.controller.cooldown": _CONTROLLER,
    "precision.controller.patience": _CONTROLLER,
    "precision.controller.recalibrate_interval": _CONTROLLER,
    "precision.controller.retry_steps": _CONTROLLER,
    "precision.controller.spike_factor": _CONTROLLER,
    "precision.lr_noise_damping": Probe("50", "weights", CONTROL),
    "precision.eval_fp32": Probe("false", "evals", {"precision.mode": "bf16_mixed"}),
    "optim.lr": Probe("0.01", "weights"),
    "optim.kind": Probe("muon", "weights"),
    "optim.momentum": Probe("0.5", "weights", {"optim.kind": "muon"}),
    "optim.betas": Probe("[0.5, 0.9]", "weights"),
    "optim.eps": Probe("0.1", "weights"),
    "optim.weight_decay": Probe("0.5", "weights"),
    "optim.moments": Probe("bf16", "weights"),
    "optim.master_weights": Probe("stochastic", "weights", {"precision.mode": "bf16_mixed"}),
    "optim.schedule": Probe("constant", "weights"),
    "optim.warmup_steps": Probe("2", "weights"),
    "optim.decay_fraction": Probe("0.9", "weights", {"optim.schedule": "wsd"}),
    "optim.min_lr_ratio": Probe("0.9", "weights"),
    "optim.clip": Probe("delayed", "weights", SLICES),
    "optim.clip_norm": Probe("0.01", "weights"),
    "optim.clip_adaptive": Probe("0.5", "weights", {"train.steps": "30"}),
    "optim.clip_elements": Probe("0.00001", "steps"),
    "optim.clip_threshold": Probe("0.001", "events"),
    "lora.rank": Probe("2", "weights"),
    "lora.alpha": Probe("8", "steps", {"lora.rank": "2"}),
    "lora.rslora": Probe("true", "steps", {"lora.rank": "2"}),
    "lora.dropout": Probe("0.5", "steps", {"lora.rank": "2"}),
    "lora.modules_to_save": Probe('["norm"]', "weights", {"lora.rank": "2"}),
    "lora.targets": Probe('["*.q_proj"]', "weights", {"lora.rank": "2"}),
    "lora.base": Probe("keep", "weights", {"lora.rank": "2"}),
    "train.minutes": "tests/training/test_minutes.py::test_a_run_in_minutes_is_the_run_of_so_many_steps",
    "train.steps": Probe("2", "steps"),
    "train.global_batch_size": Probe("8", "weights"),
    "train.micro_batch_size": Probe("4", "evals"),
    "train.activation_checkpoint": "tests/models/test_activation_bytes.py::test_eager_layer",
    "train.checkpoint_inputs": Probe("fp8", "weights", {"train.activation_checkpoint": "full"}),
    "train.compile": "tests/training/test_session.py::test_a_compiler_that_is_not_there",
    "train.log_interval": Probe("5", "shown"),
    "train.eval_interval": Probe("1", "evals"),
    "train.eval_batches": Probe("2", "evals"),
    "train.eval_part_batches": Probe("1", "evals", {"train.eval_interval": "1", "train.eval_batches": "2"}),
    "train.dpo_beta": "tests/training/test_dpo.py::test_losses_and_margins_are_those_of_a_plain_loop",
    "train.sample_tokens": Probe("4", "samples"),
    "distill.teacher": "tests/training/test_distill.py::test_a_student_comes_nearer_to_its_teacher_than_without",
    "distill.divergence": "tests/training/test_distill.py::test_another_divergence_is_another_run",
    "distill.temperature": "tests/training/test_distill.py::test_loss_and_gradients_are_those_of_whole_logits",
    "distill.cache": "tests/training/test_teacher_rows.py::test_a_run_reads_what_an_earlier_one_kept",
    "distill.cache_top_k": "tests/training/test_teacher_rows.py::test_settings_of_the_cache",
    "distill.hidden": "tests/training/test_hidden_run.py::test_a_student_comes_nearer_to_hidden_values",
    "distill.attention": "tests/training/test_hidden_run.py::test_settings_of_hidden_values_make_other_runs",
    "distill.attention_weight": "tests/training/test_hidden_run.py::test_settings_of_hidden_values_make_other_runs",
    "distill.hidden_weight": "tests/training/test_hidden_run.py::test_settings_of_hidden_values_make_other_runs",
    "distill.hidden_projection": "tests/training/test_hidden_run.py::test_settings_of_hidden_values_make_other_runs",
    "distill.weight": "tests/training/test_distill.py::test_a_student_comes_nearer_to_its_teacher_than_without",
    "memory.mlp_chunks": Probe("2", "weights"),
    "memory.loss_chunk_bytes": Probe("1", "weights", {"ops.cross_entropy": "native"}),
    "memory.attention_block": Probe("3", "weights"),
    "memory.plan": "tests/training/test_plan_files.py::test_train_executes_what_plan_wrote",
    "memory.executor": "tests/training/test_layer_major_run.py::test_it_is_the_standard_run",
    "memory.layers_per_group": "tests/training/test_layer_major_run.py::test_group_cuts_the_layers",
    "memory.offload_params": "tests/training/test_layer_major_tiers.py::test_tiers_change_no_number",
    "memory.offload_optimizer": "tests/training/test_layer_major_tiers.py::test_tiers_change_no_number",
    "memory.offload_activations": "tests/training/test_layer_major_tiers.py::test_tiers_change_no_number",
    "memory.offload_dir": "tests/training/test_layer_major_tiers.py::test_folder_of_the_disk_tier",
    "memory.prefetch": "tests/training/test_layer_major_tiers.py::test_prefetch_takes_buffers",
    "memory.rollback": "tests/training/test_layer_major_run.py::test_undo_by_checkpoint",
    "checkpoint.interval_minutes": Probe("1e-6", "checkpoints"),
    "checkpoint.interval": Probe("1", "checkpoints"),
    "checkpoint.save_last": Probe("false", "checkpoints", {"checkpoint.interval": "1"}),
    "checkpoint.keep_latest_k": Probe("1", "checkpoints", {"checkpoint.interval": "1"}),
    "checkpoint.async_save": Probe("false", "saves", {"checkpoint.interval": "1"}),
    "checkpoint.resume": Probe("required", "error"),
    "checkpoint.export_hf": Probe("true", "files"),
    "checkpoint.export_format": "tests/training/test_fp8_folder.py::test_export_format",
    "log.sinks": Probe('["tensorboard"]', "files"),
    "log.report": "tests/cli/test_train.py::test_report",
    "parallel.pp": Probe("2", "error"),
    "parallel.schedule": _STAGES,
    "parallel.virtual_stages": _STAGES,
    "parallel.split": _STAGES,
    "parallel.resplit": "tests/training/test_resplit.py::test_layers_leave_a_slow_rank_at_a_checkpoint",
    "parallel.balance": "tests/training/test_pipeline_balance.py::test_documents_go_where_they_cost_as_much",
    "parallel.dp_replicate": Probe("2", "error"),
    "parallel.dp_shard": Probe("2", "error"),
    "parallel.tp": Probe("2", "error"),
    "parallel.sequence_parallel": "tests/parallel/inside/tensor/test_sequence_slices.py::test_a_rank_keeps_its_slice",
    "parallel.dispatch": "tests/training/test_experts_run.py::test_rows_travel_in_fp8",
    "parallel.grad_sync": "tests/parallel/communicate/test_gradients.py::test_gradients_arrive_in_each_wire_format",
    "parallel.place_experts": _PLACES,
    "parallel.expert_order": _PLACES,
    "parallel.redundant_experts": _PLACES,
    "parallel.grad_sync_error": "tests/training/test_sync_hook.py::test_the_format_is_raised_and_stays",
    "parallel.param_gather": "tests/parallel/communicate/test_coded.py::test_a_weight_takes_one_byte",
    "parallel.grad_feedback": "tests/parallel/communicate/test_gradients.py::test_a_resumed_run_owes_what_it_owed",
    "data.mixing.policy": f"{_MIXING}::test_a_setting_of_mixing_reaches_its_rule",
    "data.mixing.interval": f"{_MIXED}::test_held_out_batches_rotate_at_their_own_interval",
    "data.mixing.eval_batches": f"{_MIXED}::test_held_out_batches_rotate_at_their_own_interval",
    **{
        f"data.mixing.{name}": f"{_MIXING}::test_a_setting_of_mixing_reaches_its_rule"
        for name in MixingSection.model_fields
        if name not in ("policy", "interval", "eval_batches")
    },
    "data.streaming.window": f"{_FAR}/test_far_data.py::test_rows_of_a_window_come_together",
    "data.streaming.cache_bytes": f"{_FAR}/test_far_data.py::test_a_cache_smaller_than_a_window_names_the_bytes",
    "data.streaming.retries": f"{_FAR}/test_trouble.py::test_reads_that_fail_are_tried_again_with_back_off",
    "data.streaming.backoff_s": f"{_FAR}/test_trouble.py::test_reads_that_fail_are_tried_again_with_back_off",
    "data.streaming.return_s": f"{_FAR}/test_trouble.py::test_the_others_go_on_without_a_source_that_is_away",
    "energy.measure": f"{_ENERGY}::test_it_can_be_left_out_and_changes_no_number",
    "energy.idle_seconds": f"{_ENERGY}::test_the_idle_machine_is_measured_before_the_run",
    "energy.assume_watts": f"{_ENERGY}::test_an_estimate_is_called_one",
    "energy.intensity": f"{_ENERGY}::test_an_estimate_is_called_one",
    "energy.intensity_source": f"{_ENERGY}::test_an_estimate_is_called_one",
    "parallel.ep": Probe("2", "error"),
    "parallel.reshard_after_forward": _SHARDED,
    "parallel.cpu_offload": _SHARDED,
    "parallel.reduce_each": _SHARDED,
    "parallel.timeout_minutes": "tests/parallel/test_launch.py::test_a_rank_that_waits_too_long_ends",
    "ops.linear": Probe("ref", "kernels"),
    "ops.attention": Probe("ref", "kernels"),
    "ops.linear_attention": Probe("ref", "kernels"),
    "ops.rms_norm": Probe("ref", "kernels"),
    "ops.cross_entropy": Probe("native", "kernels"),
    "ops.adam": Probe("native", "kernels"),
    "ops.low_bit_adam": Probe("ref", "kernels"),
    "ops.follow_writes": Probe("ref", "kernels"),
    "ops.newton_schulz": Probe("ref", "kernels"),
    "ops.quantize": Probe("ref", "kernels"),
    "ops.tile_gemm": Probe("ref", "kernels"),
    "plan.device_memory": Probe("1MB", "error"),
    "plan.margin": "tests/planner/test_replan.py::test_the_margin_stays_free",
    "plan.enforce": Probe("false", "error", {"plan.device_memory": "1MB"}),
}

NO_NUMBERS = ("path", "shown", "evals", "saves", "checkpoints", "files", "siblings", "samples")
"""What a setting changes that leaves all steps as they are."""
SHOWN_ELSEWHERE = ("train.micro_batch_size", "precision.controller.enabled")
"""Settings whose proof shows something else beside the numbers."""

RULES = {
    "match": ('match = "*o_proj", compute = "fp16"', 'match = "*k_proj", compute = "fp16"'),
    "op": ('op = "linear", compute = "fp16"', 'op = "head", compute = "fp16"'),
    "compute": ('match = "*o_proj", compute = "fp16"', 'match = "*o_proj", compute = "bf16"'),
    "fprop": ('match = "*o_proj", fprop = "fp8_tile"', 'match = "*o_proj", fprop = "bf16"'),
    "dgrad": ('match = "*o_proj", dgrad = "fp8_tile"', 'match = "*o_proj", dgrad = "bf16"'),
    "wgrad": ('match = "*o_proj", wgrad = "fp8_tile"', 'match = "*o_proj", wgrad = "bf16"'),
    "kind": ('match = "*o_proj", kind = "router"', 'match = "*o_proj", kind = "linear"'),
}
"""Two rules for each field of `precision.rules`, alike but for that field."""


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    """Texts and caches that all runs share, and the runs that several probes start from."""
    folder = tmp_path_factory.mktemp("settings")
    write_texts(folder / "texts")
    write_llama(folder / "llama")
    return folder, {}


def run(settings, shared, tmp_path, monkeypatch):
    """What a run with these settings gives; a run asked for again is not run again."""
    folder, known = shared
    key = tuple(sorted(settings.items()))
    if key not in known:
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr("tilewright.planner.machine.ceilings.measure", fixed_ceilings)
        for name in ("texts", "rows.jsonl", "talks.jsonl", "llama"):
            (tmp_path / name).symlink_to(folder / name)
        known[key] = observe({"data.source": "texts", "data.cache_dir": str(folder / "cache")} | settings, tmp_path)
    return known[key]


@pytest.mark.parametrize("name", [name for name, proof in PROOFS.items() if isinstance(proof, Probe)])
def test_the_setting_changes_what_it_is_for(name, shared, tmp_path, monkeypatch):
    proof = PROOFS[name]
    assert isinstance(proof, Probe)
    given = BASE | proof.given
    for part in ("without", "with"):
        (tmp_path / part).mkdir()
    without = run(given, shared, tmp_path / "without", monkeypatch)
    changed = run(given | {name: proof.value}, shared, tmp_path / "with", monkeypatch)
    assert proof.sees in without or proof.sees in changed
    assert without.get(proof.sees) != changed.get(proof.sees), f"{name} = {proof.value} changes nothing in {proof.sees}"
    if setting_names.changes_numbers(name):
        assert name in SHOWN_ELSEWHERE or proof.sees not in NO_NUMBERS, (
            f"{name} is said to change numbers, and its proof shows none"
        )
    elif without["error"] is None and changed["error"] is None:
        assert _same_weights(without, changed), f"{name} is said to change no number of a step, and the weights differ"


@pytest.mark.parametrize("name", RULES)
def test_each_field_of_a_rule_changes_what_a_step_computes(name, shared, tmp_path, monkeypatch):
    runs = []
    for number, rule in enumerate(RULES[name]):
        (tmp_path / str(number)).mkdir()
        settings = BASE | {"precision.mode": "bf16_mixed", "precision.rules": f"[{{ {rule} }}]"}
        runs.append(run(settings, shared, tmp_path / str(number), monkeypatch))
    assert [found["error"] for found in runs] == [None, None]
    assert runs[0]["precision"] != runs[1]["precision"]
    assert runs[0]["weights"] != runs[1]["weights"]


def _same_weights(one, other):
    """Of two runs; where a probe keeps no checkpoint of the last step, of those that both kept."""
    return one["checkpoints"][-1:] != other["checkpoints"][-1:] or one["weights"] == other["weights"]


@pytest.mark.parametrize("section", setting_names.sections())
def test_each_setting_says_whether_it_changes_numbers(section):
    """Once, where it is declared. A resumed run, and steps found for minutes, go by it."""
    model = setting_names.sections()[section]
    own = {item.path.rpartition(".")[2] for item in setting_names.fields() if item.path.rpartition(".")[0] == section}
    keeps, changes = list(model.keeps_numbers), list(model.changes_numbers)
    said = keeps + (sorted(own - set(keeps)) if changes == list(EVERY) else changes)
    assert sorted(said) == sorted(own), "each setting of a section is in one of its two lists, once"


def test_every_setting_has_a_proof():
    assert set(PROOFS) == {item.path for item in setting_names.fields()}
    assert set(RULES) == set(PrecisionRule.model_fields)


@pytest.mark.parametrize("name", [name for name, proof in PROOFS.items() if isinstance(proof, str)])
def test_the_test_that_proves_it_is_there(name):
    proof = PROOFS[name]
    assert isinstance(proof, str)
    path, _, test = proof.partition("::")
    text = (ROOT / path).read_text(encoding="utf-8")
    assert not test or re.search(rf"^def {test}\b", text, re.MULTILINE)
    assert name.rpartition(".")[2] in text


@pytest.fixture(scope="module")
def words_outside():
    """All words of the files that are neither of `core` nor of `cli`."""
    package = ROOT / "src" / "tilewright"
    readers = [file for file in package.rglob("*.py") if not {"core", "cli"} & set(file.parts[-2:-1])]
    return {word for file in readers for word in re.findall(r"\w+", file.read_text(encoding="utf-8"))}


@pytest.mark.parametrize("path", [item.path for item in setting_names.fields()])
def test_every_setting_is_read_outside_of_core(path, words_outside):
    """By its name as an attribute or as a text, in the package that it belongs to."""
    assert path.rpartition(".")[2] in words_outside or path == "log.report"
