"""Linearize pretrained transformers: the science, without Prefect, Ray, MLflow or lm-eval.

Importing this package imports nothing heavy; its modules are imported where they are used:

    from linear_core.recipe import Recipe
    from linear_core.models import load
    from linear_core.convert import convert

    model = convert(load("smollm2-135m"), Recipe.parse("gdn 56+8 conv"))
"""

import logging

__version__ = "0.1.0"

# transformers imports torchao where it is installed (for 8-bit backbones), which then says what it lacks
for _name in ("torchao", "torch.utils._pytree"):
    logging.getLogger(_name).setLevel(logging.ERROR)
