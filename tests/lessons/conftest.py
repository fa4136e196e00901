"""The lesson that a file tests, by the file's name."""

import lesson_code
import pytest


@pytest.fixture(scope="module")
def lesson(device, request):
    """The code of the lesson for test_<stem>.py.

    Interpreted, lessons do without bfloat16. The tests' interpreter is mended,
    so there it joins the lists that the file names in ``WITH_BFLOAT16``.
    """
    module = lesson_code.load(request.module.__name__.removeprefix("test_"))
    for name in getattr(request.module, "WITH_BFLOAT16", []):
        import torch

        dtypes = getattr(module, name)
        if torch.bfloat16 not in dtypes:
            dtypes.append(torch.bfloat16)
    return module
