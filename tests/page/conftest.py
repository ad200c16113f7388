"""Browsers for the tests of the page."""

from collections.abc import Callable, Iterator

import pytest

from tests.page.webdriver import Browser, browsers


@pytest.fixture
def open_window() -> Iterator[Callable[..., Browser]]:
    with browsers() as opener:
        yield opener
