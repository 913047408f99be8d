"""Training loops: `python -m weft sft` and `python -m weft grpo`.

Each loop is one file that reads from top to bottom. Run it as it is, or copy it. The
other files hold the parts that both loops use. The loops need the extra `train`.
"""

from weft.recipes.batches import BatchOrder, requests
from weft.recipes.grpo import Reply, Reward, advantages
from weft.recipes.schedule import SCHEDULES, learning_rate
from weft.recipes.watch import Watch

__all__ = [
    "BatchOrder",
    "Reply",
    "Reward",
    "SCHEDULES",
    "Watch",
    "advantages",
    "learning_rate",
    "requests",
]
