"""Makes several tests from one method, over parameters, with upstream's generated names.

A decorator only attaches a recipe to the method, as its attribute ``parametrize_fn``. The tests are made when
:func:`instantiate_parametrized_tests` or ``instantiate_device_type_tests`` sees the class. A recipe is called with
``(test, generic_cls, device_cls)`` and yields :data:`Variant` tuples; these and the names ``_TestParametrizer`` and
``_parametrize_test`` are upstream's, because test files derive their own decorators from them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

import torch

__unittest = True  # keeps the frames of this module out of the tracebacks that unittest prints

Test = Callable[..., Any]
Decorator = Callable[[Any], Any]
Parameters = dict[str, Any]
# The test, the suffix of its name, the arguments it is called with, and which decorators it gets, given all arguments.
Variant = tuple[Test, str, Parameters, Callable[[Parameters], Iterable[Decorator]]]
Recipe = Callable[..., Iterable[Variant]]
Class = TypeVar("Class", bound=type)

RECIPE = "parametrize_fn"


def no_decorators(_: Parameters) -> list[Decorator]:
    return []


class _TestParametrizer:
    """The base class of the decorators that turn one test into several."""

    def _parametrize_test(self, test: Test, generic_cls: type, device_cls: type | None) -> Iterator[Variant]:
        raise NotImplementedError

    def __call__(self, fn: Test) -> Test:
        inner = getattr(fn, RECIPE, None)
        recipe = self._parametrize_test if inner is None else compose_parametrize_fns(inner, self._parametrize_test)
        setattr(fn, RECIPE, recipe)
        return fn


def compose_parametrize_fns(old_parametrize_fn: Recipe, new_parametrize_fn: Recipe) -> Recipe:
    """Return a recipe for the product of two. In names, the part of the new one (the upper decorator) comes first.

    When tests are made, it raises ``RuntimeError`` if both give the same argument.
    """

    def product(test: Test, generic_cls: type, device_cls: type | None) -> Iterator[Variant]:
        for inner_test, inner_name, inner_arguments, inner_decorators in old_parametrize_fn(
            test, generic_cls=generic_cls, device_cls=device_cls
        ):
            for outer_test, outer_name, outer_arguments, outer_decorators in new_parametrize_fn(
                inner_test, generic_cls=generic_cls, device_cls=device_cls
            ):
                twice = inner_arguments.keys() & outer_arguments.keys()
                if twice:
                    raise RuntimeError(f"{test.__name__} is parametrized twice over {', '.join(sorted(twice))}")
                yield (
                    outer_test,
                    "_".join(filter(None, (outer_name, inner_name))),
                    inner_arguments | outer_arguments,
                    _both(inner_decorators, outer_decorators),
                )

    return product


def _both(
    first: Callable[[Parameters], Iterable[Decorator]], second: Callable[[Parameters], Iterable[Decorator]]
) -> Callable[[Parameters], list[Decorator]]:
    return lambda arguments: [*first(arguments), *second(arguments)]


def bound_test(test: Test, arguments: Parameters, decorators: Iterable[Decorator]) -> Test:
    """Return a method that calls ``test`` with these arguments. The first of the decorators is the innermost.

    Decorators are applied to a function that belongs to this variant only, because some of them
    (``unittest.expectedFailure``) mark the function that they get. The variant has no recipe, so that a subclass of its
    class can be instantiated as well.
    """
    decorators = list(decorators)
    if decorators:
        test = functools.reduce(lambda inner, decorate: decorate(inner), decorators, _fresh(test))

    @functools.wraps(test)
    def variant(self: Any) -> Any:
        return test(self, **arguments)

    variant.__dict__.pop(RECIPE, None)
    return variant


def _fresh(test: Test) -> Test:
    @functools.wraps(test)
    def same(*args: Any, **kwargs: Any) -> Any:
        return test(*args, **kwargs)

    return same


def add_test(cls: type, name: str, test: Test) -> None:
    """Add a test to the class under a new name. It may override an inherited test.

    Raises ``AssertionError`` if the class itself has the name already, because one of the two would be lost.
    """
    if name in vars(cls):
        raise AssertionError(f"two tests of {cls.__name__} would have the name {name}: give one of them another name")
    test.__name__ = name
    test.__qualname__ = f"{cls.__qualname__}.{name}"
    setattr(cls, name, test)


def instantiate_parametrized_tests(generic_cls: Class) -> Class:
    """Replace each parametrized method of a test class by its variants. Use it as a class decorator, or call it.

    Names are ``<method>_<suffix>``, as upstream makes them. Differs from upstream's: if a parametrized method is
    inherited from a class that was not instantiated, this class also gets its variants. Upstream raises an error.
    """
    for attribute in dir(generic_cls):
        generic = getattr(generic_cls, attribute)
        recipe = getattr(generic, RECIPE, None)
        if recipe is None:
            continue
        if attribute in vars(generic_cls):
            delattr(generic_cls, attribute)
        if hasattr(generic_cls, attribute):
            setattr(generic_cls, attribute, None)  # hides the base's method, which lacks its arguments
        for test, suffix, arguments, decorators in recipe(generic, generic_cls=generic_cls, device_cls=None):
            name = f"{test.__name__}_{suffix}"
            add_test(generic_cls, name, bound_test(test, arguments, decorators(arguments)))
    return generic_cls


class subtest:
    """An entry of :class:`parametrize` with its own name or decorators.

    ``arg_values`` has the form of a plain entry: the value of a single parameter, or a tuple with one value for each.
    """

    __slots__ = ("arg_values", "decorators", "name")

    def __init__(self, arg_values: Any, name: str | None = None, decorators: Iterable[Decorator] | None = None) -> None:
        self.arg_values = arg_values
        self.name = name
        self.decorators = list(decorators or ())


class parametrize(_TestParametrizer):
    """Make a test for each entry of ``arg_values``; ``arg_str`` names the parameters, separated by commas.

    An entry is a value, or a tuple of values when there are several parameters, or a :class:`subtest`. The suffix of
    the name is the subtest's, or ``name_fn(*values)``, or for each parameter what :meth:`_value_name` says.

    When the tests are made, it raises ``RuntimeError`` for an entry of the wrong length, and ``ValueError`` if there
    are no entries, because such a test would disappear. Differs from upstream's: the entries are read when the
    decorator is applied, so that a generator works for several classes.
    """

    def __init__(self, arg_str: str, arg_values: Iterable[Any], name_fn: Callable[..., str] | None = None) -> None:
        self.arg_names = [name.strip() for name in arg_str.split(",") if name]
        self.arg_values = list(arg_values)
        self.name_fn = name_fn

    def _parametrize_test(self, test: Test, generic_cls: type, device_cls: type | None) -> Iterator[Variant]:
        if not self.arg_names:
            yield test, "", {}, no_decorators
            return
        if not self.arg_values:
            raise ValueError(f"{test.__qualname__} is parametrized over no values, so the test would disappear")
        for index, entry in enumerate(self.arg_values):
            case = entry if isinstance(entry, subtest) else subtest(entry)
            values = list(case.arg_values) if len(self.arg_names) > 1 else [case.arg_values]
            if len(values) != len(self.arg_names):
                raise RuntimeError(
                    f"entry {index} of the parameters of {test.__qualname__} has {len(values)} values "
                    f"for {len(self.arg_names)} names ({', '.join(self.arg_names)})"
                )
            suffix = case.name or self._suffix(index, values)
            yield test, suffix, dict(zip(self.arg_names, values, strict=True)), _always(case.decorators)

    def _suffix(self, index: int, values: list[Any]) -> str:
        if self.name_fn is not None:
            return self.name_fn(*values)
        return "_".join(self._value_name(index, *pair) for pair in zip(self.arg_names, values, strict=True))

    @staticmethod
    def _value_name(index: int, name: str, value: Any) -> str:
        """Upstream's name for one value: that of a dtype or device, or the parameter's name with the value or index."""
        match value:
            case torch.dtype():
                return str(value).removeprefix("torch.")
            case torch.device():
                return str(value)
            case int() | float() | str():
                return f"{name}_{str(value).replace('.', '_')}"
            case _:
                return f"{name}{index}"


def _always(decorators: list[Decorator]) -> Callable[[Parameters], list[Decorator]]:
    return lambda _: decorators


class decorateIf(_TestParametrizer):
    """Apply a decorator to those variants for whose arguments ``predicate_fn`` is true."""

    def __init__(self, decorator: Decorator, predicate_fn: Callable[[Parameters], bool]) -> None:
        self.decorator = decorator
        self.predicate_fn = predicate_fn

    def _parametrize_test(self, test: Test, generic_cls: type, device_cls: type | None) -> Iterator[Variant]:
        yield test, "", {}, lambda arguments: [self.decorator] if self.predicate_fn(arguments) else []
