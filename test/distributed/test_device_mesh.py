"""The ranks, groups, coordinates and names of meshes and of what is made from them, on each rank of a world of eight.

The ranks are simulated one by one in one process with the fake backend, which makes groups and does not communicate.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from torch_fsdp_tests.common_distributed import MultiProcessTestCase, needs
from torch_fsdp_tests.common_utils import run_tests
from torch_fsdp_tests.device import accelerator
from torch_fsdp_tests.fsdp.combinations import subtests
from torch_fsdp_tests.fsdp.fake_worlds import fake_rank
from torch_fsdp_tests.fsdp.meshes import make_mesh
from torch_fsdp_tests.installed_torch import torch_facts, torch_names

device_mesh = torch_names.module("torch.distributed.device_mesh")
c10d = torch_names.module("torch._C._distributed_c10d")

WORLD = 8
CUBE = torch.arange(WORLD).view(2, 2, 2)  # by "a", "b" and "c"


def cube() -> DeviceMesh:
    return make_mesh(2, 2, 2, names=("a", "b", "c"))


def _of_ranks(ranks: Any) -> DeviceMesh:
    names = ("x", "y")[: torch.tensor(ranks).ndim]
    return DeviceMesh(accelerator.current().type, torch.tensor(ranks), mesh_dim_names=names)


def _flattened(*dims: str) -> DeviceMesh:
    return cube()[dims]._flatten()


def _flattened_under_a_name() -> DeviceMesh:
    mesh = cube()
    mesh["b", "c"]._flatten("x")
    return mesh["x"]


def _from_group(rows: list[list[int]], names: tuple[str, ...] | None) -> DeviceMesh:
    group, _ = dist.new_subgroups_by_enumeration(rows)
    return DeviceMesh.from_group(group, accelerator.current().type, mesh_dim_names=names)


def _from_groups(as_list: bool) -> DeviceMesh:
    other = _of_ranks(torch.arange(WORLD).view(4, 2).tolist())
    ranks = other.mesh.tolist() if as_list else other.mesh
    return DeviceMesh.from_group(other.get_all_groups(), other.device_type, mesh=ranks, mesh_dim_names=("p", "q"))


def unflattened(shape: tuple[int, ...], dim: int | str, sizes: tuple[int, ...], names: tuple[str, ...]) -> DeviceMesh:
    return make_mesh(*shape, names=("a", "b")[: len(shape)])._unflatten(dim, sizes, names)


# Meshes, with all ranks in the order in which meshes of one shape would divide them, and the names of their dimensions.
# Leading dimensions of the tensor select a mesh; the rest are its ranks.
Case = tuple[Callable[[], DeviceMesh], torch.Tensor, tuple[str, ...]]
ODD = [[1, 3, 5, 7], [0, 2, 4, 6]]
MESHES: dict[str, Case] = {
    "whole": (cube, CUBE, ("a", "b", "c")),
    "first dimension": (lambda: cube()["a"], CUBE.permute(1, 2, 0), ("a",)),
    "second dimension": (lambda: cube()["b"], CUBE.permute(0, 2, 1), ("b",)),
    "last dimension": (lambda: cube()["c"], CUBE, ("c",)),
    "first and last": (lambda: cube()["a", "c"], CUBE.permute(1, 0, 2), ("a", "c")),
    "slice of a slice": (lambda: cube()["a", "b"]["b"], CUBE.permute(0, 2, 1), ("b",)),
    "flattened": (lambda: _flattened("a", "b"), CUBE.permute(2, 0, 1).reshape(2, 4), ("a_b",)),
    "flattened apart": (lambda: _flattened("a", "c"), CUBE.permute(1, 0, 2).reshape(2, 4), ("a_c",)),
    "flattened whole": (lambda: _flattened("a", "b", "c"), CUBE.flatten(), ("a_b_c",)),
    "flattened under a name": (_flattened_under_a_name, CUBE.reshape(2, 4), ("x",)),
    "unflattened": (
        lambda: unflattened((8,), 0, (2, 2, 2), ("x", "y", "z")),
        CUBE,
        ("x", "y", "z"),
    ),
    "first unflattened": (lambda: unflattened((4, 2), "a", (2, 2), ("x", "y")), CUBE, ("x", "y", "b")),
    "last unflattened": (lambda: unflattened((2, 4), 1, (2, 2), ("x", "y")), CUBE, ("a", "x", "y")),
    "slice of unflattened": (
        lambda: unflattened((4, 2), 0, (2, 2), ("x", "y"))["x", "b"],
        CUBE.permute(1, 0, 2),
        ("x", "b"),
    ),
    "ranks in another order": (lambda: _of_ranks([[7, 5], [3, 1]]), torch.tensor([[[7, 5], [3, 1]]]), ("x", "y")),
    "last ranks": (lambda: _of_ranks([4, 5, 6, 7]), torch.tensor([[4, 5, 6, 7]]), ("x",)),
    "from a group": (lambda: _from_group(ODD, None), torch.tensor(ODD), ()),
    "from a group, named": (lambda: _from_group(ODD, ("x",)), torch.tensor(ODD), ("x",)),
    "from groups": (lambda: _from_groups(False), torch.arange(WORLD).view(4, 2), ("p", "q")),
    "from groups and a list": (lambda: _from_groups(True), torch.arange(WORLD).view(4, 2), ("p", "q")),
}
MINUTE = timedelta(seconds=77)


@needs(torch_facts.UNFLATTENS_MESHES)
class TestDeviceMesh(MultiProcessTestCase):
    world_size = 1

    def setUp(self) -> None:
        super().setUp()
        self._spawn_processes()

    def _check(self, mesh: DeviceMesh, ranks: torch.Tensor, rank: int) -> None:
        """``mesh`` has these ranks, and ``rank`` has its place and its groups in it."""
        self.assertEqual(mesh.mesh.tolist(), ranks.tolist())
        self.assertEqual((mesh.ndim, mesh.shape, mesh.size()), (ranks.ndim, tuple(ranks.shape), ranks.numel()))
        place = tuple((ranks == rank).nonzero()[0].tolist())
        self.assertEqual(tuple(mesh.get_coordinate() or ()), place)
        self.assertEqual((mesh.get_rank(), mesh.device_type), (rank, accelerator.current().type))
        names = mesh.mesh_dim_names or (0,) * mesh.ndim
        for dim, name in enumerate(names):
            row = ranks.movedim(dim, -1)[tuple(at for other, at in enumerate(place) if other != dim)]
            for key in {dim, name} | ({None} if mesh.ndim == 1 else set()):
                group = mesh.get_group(key)
                self.assertEqual(sorted(dist.get_process_group_ranks(group)), sorted(row.tolist()))
                self.assertEqual(dist.get_process_group_ranks(group)[mesh.get_local_rank(key)], rank)
            self.assertEqual(mesh.size(dim), len(row))
            self.assertIs(mesh.get_all_groups()[dim], mesh.get_group(dim))

    @subtests(name=list(MESHES))
    def test_ranks(self, name):
        """A mesh consists of the ranks that its documentation says, also for ranks in the middle of it."""
        make, ranks, names = MESHES[name]
        for rank in (0, 3, 6):
            with fake_rank(rank, WORLD):
                mesh = make()
                self.assertEqual(tuple(mesh.mesh_dim_names or ()), names, may_be="empty")
                all_meshes = ranks.reshape(-1, *ranks.shape[ranks.ndim - mesh.ndim :])
                mine = [each for each in all_meshes if (each == rank).any()]
                if mine:
                    self._check(mesh, mine[0], rank)
                else:
                    self.assertIsNone(mesh.get_coordinate())

    @subtests(dim=["a", "b", "c"])
    def test_all_submeshes(self, dim):
        """There is one for each row of the dimension, and this rank's has the dimension's group."""
        for rank in (0, 3, 6):
            with fake_rank(rank, WORLD):
                mesh = cube()
                found = mesh._get_all_submeshes(dim)
                rows = CUBE.movedim("abc".index(dim), 2).reshape(4, 2).tolist()
                self.assertEqual(sorted(each.mesh.tolist() for each in found), sorted(rows))
                (mine,) = (each for each in found if rank in each.mesh.tolist())
                self.assertIs(mine.get_group(), mesh.get_group(dim))
                self.assertEqual(mine.mesh_dim_names, (dim,))

    @subtests(
        override=[
            {"a": "fake"},
            {1: "fake"},
            {0: "options"},
            {"b": ("fake", "options")},
            {"a": "options", 1: "fake"},
            {},
        ]
    )
    def test_backends(self, override):
        """A dimension's groups get their backend and options from ``backend_override``, by index or name."""
        options = c10d.Backend.Options("fake", MINUTE)
        given = {key: _with(options, value) for key, value in override.items()}
        with fake_rank(3, WORLD), self._groups() as made:
            make_mesh_with(given)
            for dim, name in enumerate("ab"):
                value = override.get(name, override.get(dim, ()))
                has_options = "options" in (value if isinstance(value, tuple) else (value,))
                has_backend = "fake" in (value if isinstance(value, tuple) else (value,))
                calls = [each for each in made if each["group_desc"] == f"mesh_{name}"]
                self.assertEqual(len(calls), (4, 2)[dim])
                for each in calls:
                    self.assertEqual(each["backend"], "fake" if has_backend else None)
                    self.assertEqual(
                        (each["pg_options"], each["timeout"]), (options, MINUTE) if has_options else (None,) * 2
                    )

    @subtests(method=["_flatten", "_unflatten"])
    def test_backends_of_derived_meshes(self, method):
        options = c10d.Backend.Options("fake", MINUTE)
        with fake_rank(3, WORLD), self._groups() as made:
            mesh = cube()
            del made[:]
            if method == "_flatten":
                mesh["a", "b"]._flatten("x", backend_override=("fake", options))
                descriptions = {"mesh_x": options}
            else:
                unflat = make_mesh(4, 2, names=("p", "q"))
                del made[:]
                unflat._unflatten("p", (2, 2), ("x", "y"), backend_override={"x": ("fake", options)})
                descriptions = {"mesh_x": options, "mesh_y": None}
            self.assertEqual({each["group_desc"]: each["pg_options"] for each in made}, descriptions)

    def test_refusals(self):
        """Meshes that cannot be made raise, and say why."""
        invalid: dict[str, Callable[[], Any]] = {
            "Mesh should not be bigger than default world size": lambda: make_mesh(4, 4),
            "Each mesh_dim_name must be unique": lambda: make_mesh(2, 4, names=("a", "a")),
            "should have same length": lambda: make_mesh(2, 4, names=("a",)),
            "invalid keys in backend_override": lambda: make_mesh_with({"z": "fake"}),
            "redundant dim index": lambda: make_mesh_with({0: "fake", "a": "fake"}),
            "Invalid mesh_dim_names": lambda: cube()["z"],
            "without mesh_dim_names": lambda: make_mesh(2, 4)["a"],
            "needs to be specified when device_mesh.ndim > 1": lambda: cube().get_group(),
            "already exists": lambda: cube()["a", "b"]._flatten("c"),
            "The product of": lambda: unflattened((8,), 0, (2, 2), ("x", "y")),
            "Must pass mesh": lambda: DeviceMesh.from_group([dist.new_group()] * 2, accelerator.current().type),
            "Invalid mesh": lambda: DeviceMesh.from_group(dist.new_group(), accelerator.current().type, [1, 2]),
        }
        with fake_rank(3, WORLD):
            for message, make in invalid.items():
                with self.assertRaisesRegex((RuntimeError, KeyError, ValueError), message):
                    make()

    def test_equality(self):
        """Meshes are equal, and have one hash, if ranks, shape and names are equal."""
        with fake_rank(3, WORLD):
            meshes = [
                cube(),
                cube()["a", "b"],
                cube()["b", "c"],
                make_mesh(2, 2, 2, names=("x", "b", "c")),
                make_mesh(8),
            ]
            for one, other in itertools.combinations(meshes, 2):
                self.assertNotEqual(one, other)
            for one, other in zip(meshes, [cube(), cube()["a", "b"], cube()["b", "c"]]):
                self.assertEqual((one == other, hash(one)), (True, hash(other)))

    @contextlib.contextmanager
    def _groups(self) -> Iterator[list[dict[str, Any]]]:
        """The arguments with which meshes make groups. The groups get neither."""
        made: list[dict[str, Any]] = []
        new_group = device_mesh.new_group

        def note(**kwargs: Any) -> Any:
            made.append(kwargs)
            return new_group(ranks=kwargs["ranks"])

        with mock.patch.object(device_mesh, "new_group", note):
            yield made


def _with(options: Any, value: Any) -> Any:
    """An override whose "options" are these."""
    if isinstance(value, tuple):
        return tuple(_with(options, each) for each in value)
    return options if value == "options" else value


def make_mesh_with(override: dict[Any, Any]) -> DeviceMesh:
    """A 2 x 4 mesh with this ``backend_override``."""
    return device_mesh.init_device_mesh(
        accelerator.current().type, (2, 4), mesh_dim_names=("a", "b"), backend_override=override
    )


if __name__ == "__main__":
    run_tests()
