"""Linearize pretrained transformers: the science, without Prefect, Ray, MLflow or lm-eval.

Importing this package imports nothing heavy; its modules are imported where they are used:

    from linear_core.recipe import Recipe
    from linear_core.models import load
    from linear_core.convert import convert

    model = convert(load("smollm2-135m"), Recipe.parse("gdn 56+8 conv"))
"""

__version__ = "0.1.0"
