"""Pruning, distillation, exports and searched shapes."""
