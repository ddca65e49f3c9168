"""Plans and searches beside what was measured."""
