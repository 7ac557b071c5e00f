"""The examples in docstrings run and print what they say."""

import doctest
import importlib
import pkgutil

import gin
import pytest

import retrax

MODULES = sorted(
    info.name
    for info in pkgutil.walk_packages(retrax.__path__, "retrax.")
    if not info.name.endswith("__main__")
)


@pytest.mark.parametrize("name", MODULES)
def test_examples(name):
    gin.clear_config()
    result = doctest.testmod(importlib.import_module(name))
    assert result.failed == 0


def test_there_are_examples():
    finder = doctest.DocTestFinder(exclude_empty=True)
    found = [
        test
        for name in MODULES
        for test in finder.find(importlib.import_module(name))
        if test.examples
    ]
    assert len(found) > 50
