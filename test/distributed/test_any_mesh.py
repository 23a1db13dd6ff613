"""Random programs that derive meshes from meshes: the same ranks, groups and coordinates as a plain array has.

A program has five steps. Each of them slices, flattens, unflattens or concatenates what earlier ones made. The
reference is an array of positions in the tensor of ranks from which all meshes of a program come. Some ranks run the
program, one after another in one process, with the fake backend, which makes groups and does not communicate.
"""

from __future__ import annotations

import dataclasses
import itertools
import pickle
import random
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from torch_fsdp_tests.common_distributed import MultiProcessTestCase, needs
from torch_fsdp_tests.common_utils import TEST_WITH_SLOW, run_tests
from torch_fsdp_tests.common_utils.seed import seed_of_run
from torch_fsdp_tests.device import accelerator
from torch_fsdp_tests.fsdp.fake_worlds import fake_rank
from torch_fsdp_tests.installed_torch import torch_facts

WORLD = 12
STEPS = 5
PROGRAMS = 200 if TEST_WITH_SLOW else 24
NAMES = "abcdefgh"

# The tensors of ranks from which programs start: all ranks, in another order, and some of them.
ROOTS: Sequence[np.ndarray] = (
    np.arange(12),
    np.arange(12).reshape(3, 4),
    np.arange(12).reshape(2, 3, 2),
    np.arange(12).reshape(2, 1, 6),
    np.arange(12).reshape(2, 6)[::-1, ::-1],
    np.arange(12).reshape(3, 2, 2).transpose(2, 0, 1),
    np.array([[7, 5, 3], [1, 9, 11]]),
    np.arange(4, 12).reshape(2, 2, 2),
)


@dataclasses.dataclass(frozen=True)
class Plain:
    """What a mesh is to one rank: a position in the root's tensor for each element, and the names of the dimensions."""

    positions: np.ndarray
    names: tuple[str, ...]

    def __eq__(self, other: object) -> bool:
        assert isinstance(other, Plain)
        return self.names == other.names and np.array_equal(self.positions, other.positions)

    def sliced(self, names: tuple[str, ...], mine: int) -> Plain:
        """The elements that have this rank's coordinates in all other dimensions."""
        place = self.place(mine)
        keys = tuple(slice(None) if name in names else at for name, at in zip(self.names, place, strict=True))
        return Plain(self.positions[keys], tuple(name for name in self.names if name in names))

    def flattened(self, name: str) -> Plain:
        return Plain(self.positions.reshape(-1), (name,))

    def unflattened(self, dim: int, sizes: tuple[int, ...], names: tuple[str, ...]) -> Plain:
        shape = list(self.positions.shape)
        shape[dim : dim + 1] = sizes
        return Plain(self.positions.reshape(shape), (*self.names[:dim], *names, *self.names[dim + 1 :]))

    def beside(self, other: Plain, mine: int) -> Plain:
        """All combinations of the moves from this rank that two meshes allow."""
        return Plain(np.add.outer(self.positions, other.positions) - mine, self.names + other.names)

    def place(self, mine: int) -> tuple[int, ...]:
        return tuple(np.argwhere(self.positions == mine)[0].tolist())

    @property
    def ascends(self) -> bool:
        return bool((np.diff(self.positions.reshape(-1)) > 0).all())

    @property
    def is_orthogonal(self) -> bool:
        """Whether each stride is a multiple of what the smaller strides span."""
        steps = sorted(itertools.chain.from_iterable(map(_steps, self._rows())), reverse=True)
        return all(one % (other * size) == 0 for (one, _), (other, size) in itertools.pairwise(steps))

    def _rows(self) -> list[np.ndarray]:
        return [
            np.moveaxis(self.positions, dim, 0).reshape(len_, -1)[:, 0] for dim, len_ in enumerate(self.positions.shape)
        ]


def _steps(row: np.ndarray) -> Iterator[tuple[int, int]]:
    """The strides of one dimension, each with its size. A flattened dimension may have several."""
    while len(row) > 1:
        stride, size = int(row[1] - row[0]), 2
        while size < len(row) and row[size] - row[0] == size * stride:
            size += 1
        yield stride, size
        row = row[::size]


@dataclasses.dataclass(frozen=True)
class Step:
    """Makes a mesh out of earlier ones, which have these numbers. ``words`` describe it."""

    words: str
    sources: tuple[int, ...]
    of_mesh: Callable[..., DeviceMesh]
    of_plain: Callable[..., Plain]  # the last argument is the position of the rank


class Program:
    """Valid steps from a root, chosen by a seed. They are valid for each rank if they are for the first one."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self.root = self._random.choice(ROOTS)
        self.names = tuple(self._random.sample(NAMES[:5], self.root.ndim))
        self.steps: list[Step] = []
        self.flattened: dict[str, Plain] = {}  # a root remembers these by their names
        self.made = [self.whole()]  # to the first rank
        kinds = [self._slice, self._flatten]
        if torch_facts.CONCATENATES_MESHES:
            kinds.append(self._concatenate)
        if torch_facts.UNFLATTENS_MESHES:
            kinds.append(self._unflatten)
        while len(self.steps) < STEPS:
            step = self._random.choice(kinds)()
            if step is not None:
                self.steps.append(step)
                self.made.append(step.of_plain(*(self.made[source] for source in step.sources), 0))

    def __str__(self) -> str:
        lines = [f"mesh 0 is {self.root.tolist()} named {self.names}"]
        lines += [f"mesh {number} is {step.words}" for number, step in enumerate(self.steps, 1)]
        return ", ".join(lines)

    def ranks(self) -> list[int]:
        """Some ranks, the last of which is in the mesh."""
        return [*self._random.sample(range(WORLD), 2), self._random.choice(self.root.reshape(-1).tolist())]

    def whole(self) -> Plain:
        return Plain(np.arange(self.root.size).reshape(self.root.shape), self.names)

    def plain(self, mine: int) -> list[Plain]:
        """The reference of each mesh for the rank at this position."""
        made = [self.whole()]
        for step in self.steps:
            made.append(step.of_plain(*(made[source] for source in step.sources), mine))
        return made

    def meshes(self) -> list[DeviceMesh]:
        """Run the steps."""
        made = [DeviceMesh(accelerator.current().type, self.root.tolist(), mesh_dim_names=self.names)]
        for step in self.steps:
            made.append(step.of_mesh(*(made[source] for source in step.sources)))
        return made

    def _pick(self) -> tuple[int, Plain]:
        """Choose a mesh, more often one with several dimensions, of which more can be made."""
        weights = [plain.positions.ndim**2 for plain in self.made]
        number = self._random.choices(range(len(self.made)), weights)[0]
        return number, self.made[number]

    def _slice(self) -> Step | None:
        number, plain = self._pick()
        if number == 0 and self.flattened and self._random.random() < 0.5:
            return self._slice_of_flattened()
        kept = sorted(self._random.sample(range(len(plain.names)), self._random.randint(1, len(plain.names))))
        names = tuple(plain.names[dim] for dim in kept)
        if names != plain.names and not plain.sliced(names, 0).ascends:
            return None
        key = names if len(names) > 1 else names[0]
        return Step(
            f"{number}[{key}]", (number,), lambda mesh: mesh[key], lambda source, mine: source.sliced(names, mine)
        )

    def _slice_of_flattened(self) -> Step:
        """A root can also be sliced by the names of what was flattened."""
        name = self._random.choice([*self.flattened])
        sources = next(step for step in self.steps if step.words.endswith(f"._flatten() to {name}")).sources
        return Step(
            f"0[{name}] of {sources[0]}",
            (0, *sources),
            lambda mesh, source: mesh[name],
            lambda root, source, mine: source.flattened(name),
        )

    def _flatten(self) -> Step | None:
        number, plain = self._pick()
        given = self._random.choice([None, *NAMES])
        name = given or "_".join(plain.names)
        if plain.names != (name,):
            known = self.flattened.get(name, plain.flattened(name))
            others = {each for made in self.made for each in made.names} - self.flattened.keys()
            # The first raises: see _check_names. Dimensions with the other names would be mixed up.
            if known != plain.flattened(name) or name in others:
                return None
            self.flattened[name] = known
        return Step(
            f"{number}._flatten() to {name}",
            (number,),
            lambda mesh: mesh._flatten(given),
            lambda source, mine: source.flattened(name),
        )

    def _unflatten(self) -> Step | None:
        number, plain = self._pick()
        dim = self._random.randrange(len(plain.names))
        size = plain.positions.shape[dim]
        first = self._random.choice([each for each in range(1, size + 1) if size % each == 0])
        free = [name for name in NAMES if name not in plain.names and name not in self.flattened]
        if len(free) < 2:
            return None
        names = tuple(self._random.sample(free, 2))
        key = self._random.choice([dim, plain.names[dim]])
        sizes = (first, size // first)
        return Step(
            f"{number}._unflatten({key!r}, {sizes}, {names})",
            (number,),
            lambda mesh: mesh._unflatten(key, sizes, names),
            lambda source, mine: source.unflattened(dim, sizes, names),
        )

    def _concatenate(self) -> Step | None:
        """Some dimensions of a mesh and some others, of the same mesh or of another one."""
        sources = self._pick(), self._pick()
        (one, plain), (two, other) = (sources[0], sources[self._random.random() < 0.5])
        names = self._random.sample(plain.names, self._random.randint(1, len(plain.names)))
        first = tuple(name for name in plain.names if name in names)
        second = tuple(name for name in other.names if name not in names)
        if not second or not all(each.sliced(kept, 0).ascends for each, kept in ((plain, first), (other, second))):
            return None

        def both(source: Plain, last: Plain, mine: int) -> Plain:
            return source.sliced(first, mine).beside(last.sliced(second, mine), mine)

        made = both(plain, other, 0)
        if made.positions.min() < 0 or made.positions.max() >= self.root.size or not made.is_orthogonal:
            return None
        return Step(
            f"_concatenate({one}[{first}], {two}[{second}])",
            (one, two),
            lambda mesh, last: DeviceMesh._concatenate([mesh[first], last[second]]),
            both,
        )


@needs(torch_facts.UNFLATTENS_MESHES)
class TestAnyMesh(MultiProcessTestCase):
    world_size = 1

    def setUp(self) -> None:
        super().setUp()
        self._spawn_processes()

    def test_programs(self):
        for number in range(PROGRAMS):
            seed = PROGRAMS * seed_of_run() + number
            program = Program(seed)
            with self.subTest(seed=seed, program=str(program)):
                self._check_program(program)

    def _check_program(self, program: Program) -> None:
        members: dict[str, list[int]] = {}  # of each group, by its name
        ranks = program.root.reshape(-1)
        chosen = program.ranks()
        for rank in chosen:
            with fake_rank(rank, WORLD):
                if rank not in ranks:
                    whole = DeviceMesh(accelerator.current().type, program.root.tolist(), mesh_dim_names=program.names)
                    self.assertIsNone(whole.get_coordinate())
                    self.assertEqual(whole.mesh.tolist(), program.root.tolist())
                    continue
                mine = int(np.argwhere(ranks == rank)[0, 0])
                meshes, expected = program.meshes(), program.plain(mine)
                for mesh, plain in zip(meshes, expected, strict=True):
                    self._check_mesh(mesh, plain, ranks, mine)
                    for group in mesh.get_all_groups():
                        inside = dist.get_process_group_ranks(group)
                        self.assertEqual(members.setdefault(group.group_name, [*inside]), inside, "groups of one name")
                if rank == chosen[-1]:
                    self._check_equality(meshes, expected, program)
                    self._check_names(meshes, program)

    def _check_mesh(self, mesh: DeviceMesh, plain: Plain, ranks: np.ndarray, mine: int) -> None:
        positions, rank = plain.positions, int(ranks[mine])
        place = plain.place(mine)
        self.assertEqual(mesh.mesh.tolist(), ranks[positions].tolist())
        self.assertEqual((mesh.shape, mesh.ndim, mesh.size()), (positions.shape, positions.ndim, positions.size))
        self.assertEqual((mesh.mesh_dim_names, mesh.device_type), (plain.names, accelerator.current().type))
        self.assertEqual((tuple(mesh.get_coordinate() or ()), mesh.get_rank()), (place, rank))
        groups = mesh.get_all_groups()
        for dim, name in enumerate(plain.names):
            row = ranks[plain.sliced((name,), mine).positions].tolist()
            for key in (dim, name, *([None] if mesh.ndim == 1 else [])):
                group = mesh.get_group(key)
                inside = dist.get_process_group_ranks(group)
                self.assertEqual(sorted(inside), sorted(row), f"group of dimension {name}")
                self.assertEqual(inside[mesh.get_local_rank(key)], rank)
                self.assertIs(group, groups[dim])
            self.assertEqual(mesh.size(dim), len(row))
            again = DeviceMesh.from_group(mesh.get_group(name), mesh.device_type)
            self.assertEqual(again.mesh.tolist(), inside)
            rows = [each.mesh.tolist() for each in mesh._get_all_submeshes(name)]
            self.assertIn(row, rows)
            self.assertEqual(sorted(itertools.chain(*rows)), sorted(ranks.tolist()))
        backwards = plain.names[::-1]
        if mesh.ndim > 1 and not Plain(positions.transpose(), backwards).ascends:
            with self.assertRaisesRegex(KeyError, "ascending order"):
                mesh[backwards]

    def _check_names(self, meshes: Sequence[DeviceMesh], program: Program) -> None:
        """The name of a flattened mesh cannot be given to other ranks."""
        for name, known in program.flattened.items():
            for mesh, plain in zip(meshes, program.made, strict=True):
                if plain.names != (name,) and plain.flattened(name) != known:
                    with self.assertRaisesRegex(ValueError, "has been created before"):
                        mesh._flatten(name)

    def _check_equality(self, meshes: Sequence[DeviceMesh], plain: Sequence[Plain], program: Program) -> None:
        """Meshes are equal if and only if their ranks and names are, also those of another run of the program."""
        again = program.meshes()
        for (mesh, one), (other, two) in itertools.product(zip(meshes, plain), zip(again, plain)):
            self.assertEqual(mesh == other, one == two, f"{mesh} == {other}")
            if one == two:
                self.assertEqual(hash(mesh), hash(other))
        for mesh in meshes:
            copied = pickle.loads(pickle.dumps(mesh))
            self.assertEqual((copied == mesh, copied.mesh.tolist()), (True, mesh.mesh.tolist()))
            self.assertIs(copied.get_group(0), mesh.get_group(0))


if __name__ == "__main__":
    run_tests()
