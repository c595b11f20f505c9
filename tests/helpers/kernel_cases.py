"""Where tests of kernels run, a GPU or Triton's interpreter, and how exact they are there."""

import pytest
import torch

from attnreg import kernels

DEVICE = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


DTYPE = torch.float32 if DEVICE.type == "cpu" else torch.bfloat16  # the interpreter multiplies bfloat16 wrongly
TOLERANCE = {torch.float32: 3e-5, torch.float16: 6e-3, torch.bfloat16: 4e-2}  # over the largest value
LEAST = {torch.float32: 0.1, torch.float16: 0.5, torch.bfloat16: 0.5}  # or over this
MARKS = [
    pytest.mark.interpreter,
    pytest.mark.gpu,
    pytest.mark.skipif(not kernels.runs_on(DEVICE), reason="needs Triton, and a GPU or TRITON_INTERPRET=1"),
    pytest.mark.filterwarnings("default"),  # those of compilers are not ours
    pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning"),  # NumPy's, about the interpreter
    pytest.mark.filterwarnings("ignore:divide by zero:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning"),  # integers that wrap around
]
