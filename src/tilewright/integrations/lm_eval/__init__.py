"""Published tasks on our models, by EleutherAI's lm-evaluation-harness (the extra `eval`)."""
