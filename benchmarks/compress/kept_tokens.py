"""Which tokens of a teacher to keep: gradients of a student's logits from K tokens per position, as they come back from
disk, beside those from whole distributions, in FP64.

Of the likeliest tokens with all others as one group, and of tokens that are drawn (`models.distill.sampled`): how far
the mean over all draws is from the whole gradient (bias), and how far one draw is from that mean (noise), both over the
whole gradient's length, root mean squares over positions. Beside them the noise of the label itself, one draw of the
text. The student is the teacher with half of its FFN channels and heads cut, on held-out text, before recovery. Then
it is recovered from 32 drawn tokens, and from whole distributions: the rise of one loss over the other, relative, with
the standard error of differences of held-out rows. The folder may be that of `prune_recovery`, where the latter is; a
seed that has ended is read.

python -m benchmarks.compress.kept_tokens --work FOLDER [--teacher-steps 600] [--steps 120] [--seeds 3]
"""

import argparse
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.common import write_result
from benchmarks.compress.prune_stages import Study
from tilewright.compress.prune.prune import prune
from tilewright.models.distill.kept_tokens import bytes_per_position, decode, encode, keeping
from tilewright.models.distill.sampled import weights
from tilewright.models.distill.top_k import top_k_of

CLAIM = (
    "gradients from a teacher's drawn tokens have no bias and little noise; from its likeliest tokens they are biased"
)
TOP_K = (8, 16, 32, 64)
POSITIONS, DRAWS = 512, 64


def of_likeliest(p_CV: Tensor, q_CV: Tensor, top_k: int) -> Tensor:
    """Gradient of logits from groups."""
    vocab_size = p_CV.shape[-1]
    ids, groups = top_k_of(p_CV.log().float(), top_k)
    ids, groups = decode(encode(ids, groups, vocab_size), top_k, vocab_size)
    theirs = keeping("reverse_kl").normalized(groups).double().exp()
    rest = q_CV.scatter(-1, ids, 0.0)
    share = 1 - theirs[:, -1:] / rest.sum(-1, keepdim=True)
    return (rest * share).scatter(-1, ids, q_CV.gather(-1, ids) - theirs[:, :-1])


def of_sampled(p_CV: Tensor, q_CV: Tensor, top_k: int, generator: torch.Generator) -> Tensor:
    """Gradient of logits from one draw."""
    vocab_size, how = p_CV.shape[-1], keeping("forward_kl")
    ids, logs = how.choose(p_CV.log().float(), top_k, torch.rand(len(p_CV), generator=generator))
    ids, logs = decode(encode(ids, logs, vocab_size), top_k, vocab_size)
    return q_CV - torch.zeros_like(q_CV).scatter(-1, ids, weights(how.normalized(logs)).double())


def recovered(study: Study, student: Any) -> dict[str, Any]:
    """From drawn tokens, over from whole distributions."""
    sampled = study.trained("both-sampled-0.5", student, taught=True)
    live = study.trained("both-live-0.5", student, taught=True, cached=False)
    rise, error = sampled.rise_over(live)
    return {"steps": study.steps, "rise": rise, "error": error}


def of_seed(study: Study) -> dict[str, Any]:
    """Of one teacher and its cut."""
    student = prune(study.source.model, {"ffn": 0.5, "heads": 0.5}, batches=study.seen, refit=True).model
    return {"gradients": gradients(study, student), "recovered": recovered(study, student)}


def gradients(study: Study, student: Any) -> dict[str, Any]:
    """Of logits, by how many tokens are kept."""
    batch = next(iter(study.batches.values()))[0]
    with torch.no_grad():
        p_CV, q_CV = (
            model.logits(batch["input_ids"]).flatten(0, 1)[:POSITIONS].double().softmax(-1)
            for model in (study.source.model, student)
        )
    whole = q_CV - p_CV
    length = float(whole.square().sum(-1).mean().sqrt())
    size = lambda grad: float(grad.square().sum(-1).mean().sqrt()) / length  # noqa: E731
    found: dict[str, Any] = {
        "positions": len(p_CV),
        "vocabulary": p_CV.shape[-1],
        "entropy": float(-(p_CV * p_CV.log()).sum(-1).mean()),
        "noise of the label": float((1 - p_CV.square().sum(-1)).mean().sqrt()) / length,
    }
    for top_k in TOP_K:
        generator = torch.Generator().manual_seed(top_k)
        draws = [of_sampled(p_CV, q_CV, top_k, generator) - whole for _ in range(DRAWS)]
        mean = torch.stack(draws).mean(0)
        noise = size(torch.stack(draws) - mean) * (DRAWS / (DRAWS - 1)) ** 0.5
        found[str(top_k)] = {
            "bytes": bytes_per_position(top_k, p_CV.shape[-1]),
            "share of others": float(1 - p_CV.topk(top_k, -1).values.sum(-1).mean()),
            "bias of likeliest": size(of_likeliest(p_CV, q_CV, top_k) - whole),
            "bias of sampled": size(mean),
            "bias of sampled that noise alone has": noise / DRAWS**0.5,
            "noise of sampled": noise,
        }
    return found


def main() -> None:
    """Measure, and write the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--teacher-steps", type=int, default=600)
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--seeds", type=int, default=3)
    args = parser.parse_args()
    seeds: dict[str, Any] = {}
    for seed in range(args.seeds):
        study = Study.of_text(args.work, seed, args.teacher_steps, args.steps)
        seeds[str(seed)] = study.case("kept tokens", lambda study=study: of_seed(study))
        write_result("kept_tokens", CLAIM, {"teacher_steps": args.teacher_steps, "seeds": seeds})


if __name__ == "__main__":
    main()
