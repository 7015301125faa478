"""The kit of the fault tests lies beside them."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))
pytest.register_assert_rewrite(*(file.stem for file in HERE.glob("chaos_*.py")))
