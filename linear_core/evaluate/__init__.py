"""Measuring what a linearized model lost: tasks, scores, attribution. Importing this package imports no torch and no lm-eval."""
