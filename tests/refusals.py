"""How a wrapper refuses: with the very error and words, and before anything is written."""

import pytest


def assert_refused(call, arguments, error, message, x):
    """The call raises that error, whose text begins so, and ``x`` stays as it is."""
    before = x.clone()
    with pytest.raises(error) as caught:
        call(*arguments)
    assert type(caught.value) is error and str(caught.value).startswith(message), message
    assert x.equal(before), f"something was written before: {message}"
