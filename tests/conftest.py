"""The mode of a test process: Triton's interpreter, or with ``-m gpu`` the CUDA device."""

import os

import pytest


def pytest_configure(config):
    """Triton reads the variable when it is imported, so it is set before any test module."""
    if config.option.markexpr == "gpu":
        os.environ.pop("TRITON_INTERPRET", None)
    else:
        os.environ["TRITON_INTERPRET"] = "1"


@pytest.fixture(
    scope="session", params=["interpreter", pytest.param("cuda", marks=pytest.mark.gpu)]
)
def device(request):
    """The device for the tensors of a value test, which runs once in each mode."""
    torch = pytest.importorskip("torch")
    interpreted = "TRITON_INTERPRET" in os.environ
    if request.param == "interpreter":
        if not interpreted:
            pytest.skip("-m gpu selects the tests on CUDA only")
        import interpreter_bf16

        interpreter_bf16.install()
        return "cpu"
    if interpreted:
        pytest.skip("values on CUDA are tested by: pytest -m gpu")
    if not torch.cuda.is_available():
        pytest.skip("there is no CUDA device")
    return "cuda"
