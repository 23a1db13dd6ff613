"""The seed of a run."""

from __future__ import annotations

import os
import random

import numpy as np
import torch

from torch_fsdp_tests.device import accelerator
from torch_fsdp_tests.settings import SEED_VARIABLE

DEFAULT_SEED = 1234  # upstream's


def seed_of_run() -> int:
    """The seed that every test starts from: ``TORCH_FSDP_TESTS_SEED``, else 1234.

    It is an environment variable, so that the ranks of a test get the seed that ``--seed`` gave to the test process.
    Raises :class:`ConfigurationError` if the variable is not an integer.
    """
    text = os.environ.get(SEED_VARIABLE)
    if text is None:
        return DEFAULT_SEED
    try:
        return int(text)
    except ValueError:
        raise accelerator.ConfigurationError(f"{SEED_VARIABLE} is {text[:40]!r}: give an integer") from None


def manual_seed(seed: int) -> None:
    """Seed torch's generators like :func:`torch.manual_seed`, but faster if there is no accelerator. In that case torch
    formats the caller's stack three times for devices that may be initialized later, which takes milliseconds.
    """
    if torch.accelerator.current_accelerator() is None:
        torch.default_generator.manual_seed(seed)
    else:
        torch.manual_seed(seed)


def set_rng_seed(seed: int | None = None) -> None:
    """Seed the generators of torch (all devices), :mod:`random` and numpy; by default with the seed of the run."""
    seed = seed_of_run() if seed is None else seed
    manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)  # numpy rejects some seeds that are valid in torch
