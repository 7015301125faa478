"""Runs Triton kernels in the interpreter, on CPU tensors, in this process only.

Import it before anything that may import triton (tests/conftest.py does): triton decides when a kernel is defined
whether it is interpreted. The environment is left as it was, so processes that tests start are not affected.
"""

from __future__ import annotations

import os

os.environ["TRITON_INTERPRET"] = "1"  # read while triton defines its own device functions

import triton
import triton.language

del os.environ["TRITON_INTERPRET"]
triton.knobs.propagate_env = False
triton.knobs.runtime.interpret = True
