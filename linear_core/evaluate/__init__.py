"""Measuring what a linearized model lost: tasks, scores, attribution. Importing it imports no torch and no lm-eval."""
