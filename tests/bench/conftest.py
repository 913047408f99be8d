from __future__ import annotations

import pytest
import quick  # noqa: F401  Sets the import path for the module below.

# isort: split
import models


@pytest.fixture(scope="module")
def tiny() -> tuple[str, str]:
    return ("--model", str(models.tiny_model("llama-tied")))
