"""Accuracy as a deployment check: tasks from recipes, strict graders, a log that is the state, honest intervals."""
