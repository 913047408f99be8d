"""Training loops: `python -m weft sft`, `dpo`, `grpo` and `sweep`.

Each recipe is one file that says what a step is. Run it as it is, or copy it. loop.py
makes the steps, and the other files hold the parts that the recipes share. They need
the extra `train`.
"""

from weft.recipes.batches import BatchOrder, requests
from weft.recipes.grpo import Reply, Reward, advantages
from weft.recipes.schedule import SCHEDULES, learning_rate
from weft.recipes.watch import Plot, Watch

__all__ = [
    "BatchOrder",
    "Plot",
    "Reply",
    "Reward",
    "SCHEDULES",
    "Watch",
    "advantages",
    "learning_rate",
    "requests",
]
