"""``ModelTestCase``: any model in all configurations, compared with the plain model."""

from __future__ import annotations

import dataclasses
import os
import re
import tempfile
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from torch_fsdp_tests import world_sizes
from torch_fsdp_tests.common_distributed import needs, requires_world_size
from torch_fsdp_tests.common_distributed.requirements import get_required_world_size, requires
from torch_fsdp_tests.common_fsdp import FSDPTestContinuous
from torch_fsdp_tests.defects import torch_defect
from torch_fsdp_tests.device import accelerator
from torch_fsdp_tests.fsdp.optimizers import fused_on_host
from torch_fsdp_tests.fsdp.references import of_all_ranks
from torch_fsdp_tests.installed_torch import torch_facts
from torch_fsdp_tests.models import comparing, plain
from torch_fsdp_tests.models.comparing import Tolerances, check_number, check_tensors
from torch_fsdp_tests.models.configurations import COMBINED, Configuration
from torch_fsdp_tests.models.endings import Ending, ending_of
from torch_fsdp_tests.models.explaining import Explanation, explaining
from torch_fsdp_tests.models.plain import SAVED, PlainTraining, Tensors, Unit
from torch_fsdp_tests.models.sharded import ShardedTraining, sharded
from torch_fsdp_tests.ranks import RankGroup, RanksErred, RanksFailed, are_made
from torch_fsdp_tests.verdict import State, Verdict, events

__unittest = True

STEPS = 3
_IS_GENERATED = "__of_configuration__"  # an attribute of generated methods
_FOLDER = "TORCH_FSDP_TESTS_MODEL_CHECKPOINTS"  # an environment variable of the ranks


class ModelTestCase(FSDPTestContinuous):
    """Trains a model in each of ``configurations``, and compares it with the plain model without FSDP.

    A subclass has at least :meth:`build`, :meth:`batch` and :meth:`loss`. Each name in ``configurations`` becomes a
    test; :mod:`.configurations` has the words for names. The default ones combine all options. If one fails, its
    options are tried one by one, and the message names those that fail alone.

    ``known_defects`` has the ids of registered defects of torch by configuration, and ``limits`` a regular expression
    for the error that torch raises in a configuration. Both are then expected. Raises ``ValueError`` when the class
    is made, for a configuration that does not exist.
    """

    configurations: Sequence[str] = COMBINED
    known_defects: Mapping[str, Sequence[str]] = {}
    limits: Mapping[str, str] = {}

    generate: Callable[[nn.Module], Any] | None = None  # a method that returns what the model generates, if it does

    _role: ClassVar[tuple[int, bool]]  # the world size of the ranks, and whether they load
    _idle: ClassVar[dict[tuple[int, bool], RankGroup]]  # ranks in other roles, which wait for their next test
    _folder: ClassVar[tempfile.TemporaryDirectory[str] | None] = None
    _passed: ClassVar[dict[Configuration, bool]]  # those that were tried alone
    _trained: ClassVar[tuple[Configuration, PlainTraining, Tolerances] | None]  # in a rank: the last plain training
    _repeats: ClassVar[bool]  # in a rank: whether the plain program was repeated

    def build(self) -> nn.Module:
        """A new model on the CPU, in float32. It is the same each time after the same seed."""
        raise NotImplementedError(f"{type(self).__name__} needs a method build() that returns a new model")

    def batch(self, step: int) -> Any:
        """One batch of one rank, in any nesting of containers. It is different for each number ``step``."""
        raise NotImplementedError(f"{type(self).__name__} needs a method batch(step) that returns a batch")

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        """A scalar loss of a batch. It must call ``model`` itself, because FSDP does its work in that call."""
        raise NotImplementedError(f"{type(self).__name__} needs a method loss(model, batch) that returns a loss")

    def units(self, model: nn.Module) -> list[Unit]:
        """The modules to shard beside the root: by default its blocks, see :func:`.plain.default_units`.

        A list of modules is one parameter group of FSDP2. FSDP1 leaves its modules to the root.
        """
        return plain.default_units(model)

    def freeze(self, model: nn.Module) -> None:
        """Freeze what is not trained: by default the first unit, if there are several."""
        units = plain.single(self.units(model))
        if len(units) < 2:
            self.skipTest("the model has fewer than two units, so none is frozen by default; define freeze(model)")
        units[0].requires_grad_(False)

    def parallelize(self, model: nn.Module, mesh: DeviceMesh) -> None:
        """Apply tensor parallelism over the mesh in place, before FSDP does its work. The option ``tp`` needs it."""
        self.skipTest("the model does not say how to split it; define parallelize(model, mesh)")

    def optimizer(self, params: list[nn.Parameter]) -> torch.optim.Optimizer:
        """The optimizer: by default Adam with an ``eps`` as large as gradients, so that their scale matters.

        It has no weight decay, which would change a parameter whose gradient is zero, but not one that has none.
        """
        return torch.optim.Adam(params, lr=1e-2, eps=1e-2, **fused_on_host())

    def prepare(self, model: nn.Module) -> None:
        """Change the sharded model, for example its divide factor, before it has an optimizer: by default nothing."""

    @property
    def world_size(self) -> int:  # type: ignore[override]
        """2 ranks, or 4 for HSDP and tensor parallelism."""
        return get_required_world_size(self, 2)

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls._idle, cls._trained, cls._repeats, cls._passed = {}, None, False, {}
        for name in (name for name in dir(cls) if name.startswith("test_") and name not in vars(cls)):
            if hasattr(getattr(cls, name), _IS_GENERATED):
                setattr(cls, name, None)  # hides a configuration of a base class
        for name in cls.configurations:
            configuration = Configuration.parse(name)
            if cls.generate is None:
                configuration = configuration.without("generate")
            cls._add(configuration, "test")
            for alone in configuration.alone():
                cls._add(alone, "alone")

    @classmethod
    def _add(cls, configuration: Configuration, kind: str) -> None:
        """Add the methods that train in a configuration, and that go on after it was saved."""
        name = configuration.name

        def train(self: ModelTestCase) -> None:
            self._train(configuration)

        def resume(self: ModelTestCase) -> None:
            self._resume(configuration)

        layouts = [configuration, *([configuration.resumed()] if configuration.saves else [])]
        if configuration.world_size == 4:
            train = requires_world_size(4)(train)
        if any(layout.world_size == 4 for layout in layouts):
            train = requires(lambda: accelerator.current().lacks_room_for(4))(train)
        if any(layout.interface == "replicate" for layout in layouts):
            train = needs(torch_facts.REPLICATES_WITHOUT_SHARDS)(train)
        if configuration.has("frozen") and any(layout.has("tp") for layout in layouts):
            train = needs(torch_facts.TP_KEEPS_REQUIRES_GRAD)(train)
        if name in cls.known_defects:
            train = torch_defect(*cls.known_defects[name])(train)
        for method, function in ((f"{kind}_{name}", train), (f"resume_{name}", resume)):
            if vars(cls).get(method) is None:
                setattr(function, _IS_GENERATED, True)
                function.__name__, function.__qualname__ = method, f"{cls.__qualname__}.{method}"
                setattr(cls, method, function)

    # -- in the test process

    @property
    def _configuration(self) -> Configuration:
        return Configuration.parse(self._testMethodName.partition("_")[2])

    def _join_ranks(self, fn: Callable) -> None:
        configuration = self._configuration
        limit = self.limits.get(configuration.name)
        facts: dict[str, Any] = {"name": configuration.name, "is_limit": limit is not None}
        events.record(configuration=facts)
        try:
            self._run_in_phases(configuration, "test")
        except (RanksFailed, RanksErred) as error:
            if limit is not None and _raises_as(limit, error.verdict):
                return
            if configuration.name in self.known_defects:
                raise
            causes = explaining(error.verdict, configuration)
            loader = f"in {configuration.resumed().name}, which loads" if self._role[1] else ""
            alone = "; ".join(filter(None, (loader, self._in_words(error.verdict, configuration))))
            events.record(configuration={**facts, "alone": alone, "explained": [cause._asdict() for cause in causes]})
            raise _explained(error, alone, causes) from None
        if limit is not None:
            self.fail(f"torch does not raise {limit!r} any more: remove the limit from {type(self).__name__}")

    def _run_in_phases(self, configuration: Configuration, kind: str) -> None:
        """Train in the ranks, and then, after it was saved, in other ranks."""
        cls = type(self)
        cls._ensure_ranks(configuration.world_size)
        self._run_in_ranks(f"{kind}_{configuration.name}")
        if configuration.saves:
            world_size = world_sizes.up_to(4, accelerator.current())
            events.need(world_size)
            cls._ensure_ranks(world_size, load=True)
            self._run_in_ranks(f"resume_{configuration.name}")

    def _in_words(self, verdict: Verdict, configuration: Configuration) -> str:
        """Which options of a configuration fail alone. A hang is not repeated."""
        if verdict.outcome is State.TIMED_OUT or not configuration.options:
            return ""
        interface, *single = configuration.alone()
        if not self._passes(interface):
            return f"{interface.name} fails without any option"
        failing = [each.name for each in single if not self._passes(each)] if len(single) > 1 else []
        return (
            f"these fail alone: {', '.join(failing)}" if failing else f"{interface.name} passes without these options"
        )

    def _passes(self, configuration: Configuration) -> bool:
        passed = type(self)._passed
        if configuration not in passed:
            try:
                if accelerator.current().lacks_room_for(configuration.world_size) is None:
                    self._run_in_phases(configuration, "alone")
                passed[configuration] = True
            except (RanksFailed, RanksErred):
                passed[configuration] = False
        return passed[configuration]

    @classmethod
    def _ensure_ranks(cls, world_size: int, load: bool = False) -> None:
        """Keep the ranks of each role: other processes load than train. Ranks that something else made are one set."""
        role = world_size, load
        if cls._group is not None and role != cls._role:
            if are_made():
                cls._end_group()
            else:
                cls._idle[cls._role], cls._group = cls._group, None
        cls._role = role
        if cls._group is None:
            cls._group = cls._idle.pop(role, None)
        if cls._folder is None:
            cls._folder = tempfile.TemporaryDirectory()
            cls.addClassCleanup(cls._remove_folder)
        with mock.patch.dict(os.environ, {_FOLDER: cls._folder.name}):
            super()._ensure_ranks(world_size)

    @classmethod
    def _remove_folder(cls) -> None:
        if cls._folder is not None:
            cls._folder.cleanup()
            cls._folder = None

    @classmethod
    def _conclude_class(cls) -> None:
        while cls._idle:
            cls._end_group()
            cls._group = cls._idle.popitem()[1]
        super()._conclude_class()

    # -- in a rank

    def _train(self, configuration: Configuration) -> None:
        reference, tolerances = self._reference(configuration)
        training = sharded(self, configuration)
        check = _Check(training, reference, tolerances, configuration)
        last = SAVED if configuration.saves else STEPS - 1
        for step in range(last + 1):
            check.step(step)
            if step == 0 and configuration.has("generate") and not configuration.low:
                self._check_generated(training.generated(), reference.at(0).generated)
        check.buffers(f"after step {last + 1}", reference.at(last).buffers)
        if configuration.saves:
            self._save(configuration, training, reference, tolerances)

    def _check_generated(self, actual: Any, expected: Any) -> None:
        try:
            self.assertEqual(actual, expected)
        except AssertionError as error:
            raise comparing.Mismatch(f"generate() after the first step: {error}") from error

    def _save(
        self, configuration: Configuration, training: ShardedTraining, reference: PlainTraining, tolerances: Tolerances
    ) -> None:
        """Save a training, and what the plain one has after the same step."""
        training.save(self._checkpoint(configuration, is_made=True))
        states = reference.at(SAVED).states
        buffers = of_all_ranks({name: each.cpu() for name, each in training.buffers.items() if name in states["model"]})
        if dist.get_rank() == 0:
            saved = {**states, "buffers": buffers, "tolerances": dataclasses.astuple(tolerances)}
            torch.save(saved, os.path.join(self._checkpoint(configuration), "plain.pt"))
        dist.barrier()

    def _resume(self, configuration: Configuration) -> None:
        """Load what other ranks have saved into another layout, and train one more step."""
        folder, resumed = self._checkpoint(configuration), configuration.resumed()
        reference = self._plain(resumed)
        states = torch.load(os.path.join(folder, "plain.pt"), weights_only=True)
        reference.continue_after(SAVED, states)
        training = sharded(self, resumed, seed=1)
        built = {name: each.clone() for name, each in training.buffers.items()}
        training.spoil(states["buffers"][0])
        training.load(folder)
        check = _Check(training, reference, Tolerances(*states["tolerances"]), resumed)
        check.parameters("until it was loaded", reference.values())
        check.buffers("after the load", comparing.nearest(training.buffers, built, states["buffers"]))
        reference.take_buffers(training.buffers)
        check.step(STEPS - 1)

    def _checkpoint(self, configuration: Configuration, is_made: bool = False) -> str:
        folder = os.path.join(os.environ[_FOLDER], configuration.name)
        if is_made:
            os.makedirs(folder, exist_ok=True)
        return folder

    def _plain(self, configuration: Configuration, dtype: torch.dtype | None = None) -> PlainTraining:
        sharing = configuration.ranks_of_batch
        index, batches = self.rank // sharing, dist.get_world_size() // sharing
        data = plain.Data(self, index, batches, configuration.microbatches, dtype)
        return PlainTraining(self, configuration.program, data, dtype)

    def _reference(self, configuration: Configuration) -> tuple[PlainTraining, Tolerances]:
        """The plain training by the same program, and what the sharded one may differ from it.

        Raises :class:`.plain.FailsWithoutFSDP` if it fails or shows nothing, and :class:`.plain.RanksDiffer`.
        Configurations with the same program, one after the other, share their reference.
        """
        cls, program = type(self), configuration.program
        if cls._trained is None or cls._trained[0] != program:
            cls._trained = None  # there may not be room for two
            with plain.without_fsdp():
                if not cls._repeats:
                    plain.check_repeats(self)
                    cls._repeats = True
                reference = self._plain(configuration)
                reference.at(STEPS - 1)
            cls._trained = program, reference, self._tolerances(configuration, reference)
        _, reference, tolerances = cls._trained
        if not configuration.has("root"):
            plain.check_orders(reference.steps.values())
        if tolerances.are_coarse:
            self.skipTest("nothing can be compared: most gradients of the plain model are far from those in float64")
        return reference, tolerances

    def _tolerances(self, configuration: Configuration, reference: PlainTraining) -> Tolerances:
        """Rounding is judged by the plain model in float64, if it computes in it and draws the same random numbers."""
        dtypes = {param.dtype for param in reference.params.values()}
        least = comparing.exact({plain.LOW} if configuration.low else dtypes)
        can_judge = len(dtypes) == 1 and not any(dtype.is_complex for dtype in dtypes)
        if not (can_judge and all(of_all_ranks(self._computes_in(torch.float64)))):
            return least
        exact = configuration.program.without("bf16", "bf16reduce", "autocast", "ac", "ownac", "compile", "generate")
        high = self._plain(exact, torch.float64)
        with plain.without_fsdp():
            steps = [(step, high.at(number)) for number, step in reference.steps.items()]
        return comparing.calibrated(steps, reference.start, least)

    def _computes_in(self, dtype: torch.dtype) -> bool:
        try:
            model = plain.built(self, dtype=dtype)
            plain.loss_of(self, model, plain.on_device(self.batch(0), dtype), 0).backward()
        except Exception:
            return False
        return True


def _raises_as(limit: str, verdict: Verdict) -> bool:
    """Whether torch raised what a limit says. One that fits any error says nothing."""
    raised = ending_of(verdict.outcome, verdict.ranks) not in (Ending.MISMATCH, Ending.FAILS_WITHOUT_FSDP)
    return raised and re.search(limit, "any") is None and re.search(limit, verdict.in_full) is not None


def _explained(error: RanksFailed | RanksErred, alone: str, causes: list[Explanation]) -> Exception:
    """The error, with the options that fail alone and what may be the cause."""
    verdict = error.verdict
    reason = f"{verdict.reason} ({alone})" if alone else verdict.reason
    explained: Any = type(error)(dataclasses.replace(verdict, reason=reason))
    lines = (verdict.in_full, alone, *(cause.in_full for cause in causes))
    explained.args = ("\n".join(filter(None, lines)),)
    explained.alone, explained.explained = alone, causes
    return explained


def _has_gradient(names: list[str]) -> str:
    return (
        f"{', '.join(names[:3])} got a gradient of zeros from FSDP, and none from the plain model, which does not use "
        "it in the loss, so weight decay changes it"
    )


class _Check:
    """Trains a sharded model and compares each step with that of the plain one."""

    def __init__(
        self,
        training: ShardedTraining,
        reference: PlainTraining,
        tolerances: Tolerances,
        configuration: Configuration,
    ) -> None:
        self._training, self._reference = training, reference
        self._tolerances, self._configuration = tolerances, configuration
        self._data = reference.data
        self._invented: list[str] = []  # parameters that have no gradient in the last step of the plain training
        if plain.holds_others(training.optimizer, training.model.parameters()):
            raise comparing.Mismatch(
                "optimizer(params) returned an optimizer of other parameters, such as those from before sharding: "
                "make it of `params`"
            )
        self._start = training.parameters(reference.start)

    def step(self, number: int) -> None:
        """Raises :class:`.comparing.Mismatch`."""
        expected, configuration, off = self._reference.at(number), self._configuration, self._tolerances
        at = f"of step {number + 1}"
        if configuration.has("eval"):
            actual = self._training.eval_loss(self._data, number)
            check_number(f"the loss in eval mode before step {number + 1}", actual, expected.eval_loss, off.numbers)
        losses = self._training.backward(self._data, number)
        self._training.check_features(expected.order)
        for loss, right in zip(losses, expected.losses, strict=True):
            check_number(f"the loss {at}", loss, right, off.numbers)
        self._invented = self._training.invented(expected.gradients)
        gradients = self._training.gradients(expected.gradients)
        check_tensors(f"the gradients {at}", gradients, expected.gradients, off.numbers, off.gradients)
        if configuration.has("clip"):
            check_number(f"the norm of the gradients {at}", self._training.clip(), expected.norm, off.numbers)
        self._training.update()
        self.parameters(f"after step {number + 1}", expected.parameters)

    def parameters(self, when: str, expected: Tensors) -> None:
        """Raises :class:`.comparing.Mismatch`."""
        pairs = comparing.moved(self._training.parameters(expected), self._start)
        changes = comparing.updates(expected, self._reference.start)
        own = comparing.of_updates(self._tolerances, expected, changes)
        try:
            check_tensors(f"what training has changed {when}", pairs, changes, self._tolerances.numbers, own)
        except comparing.Mismatch as error:
            if not self._invented:
                raise
            raise comparing.Mismatch(f"{error}; {_has_gradient(self._invented)}") from error

    def buffers(self, when: str, expected: Tensors) -> None:
        """Raises :class:`.comparing.Mismatch`. Those of FSDP1 may have the dtype of mixed precision."""
        if self._configuration.low:
            return
        own = self._training.buffers
        for is_float in (True, False):  # each on its own scale
            some = {name: each for name, each in expected.items() if each.is_floating_point() is is_float}
            pairs = {name: (own[name], value.to(own[name].device)) for name, value in some.items()}
            check_tensors(f"the buffers {when}", pairs, some, self._tolerances.numbers, {})
