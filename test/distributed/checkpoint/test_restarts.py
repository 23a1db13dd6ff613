"""Training over several launches, each of which loads the previous checkpoint, possibly in another layout."""

from __future__ import annotations

import os

import torch

from torch_fsdp_tests.common_distributed import skip_if_lt_x_gpu
from torch_fsdp_tests.common_utils import run_tests
from torch_fsdp_tests.distributed._tensor.common_dtensor import with_comms
from torch_fsdp_tests.fsdp.checkpoints import LAYOUTS, LayoutsMixin, SavedRun, from_first_rank, plain_run
from torch_fsdp_tests.fsdp.launches import LaunchesTestCase

STEPS = 2  # steps of each launch


class TestRestarts(LayoutsMixin, LaunchesTestCase):
    def _check_restarts(self, *layouts: str, same_directory: bool = False) -> None:
        for index, layout in enumerate(layouts):
            directories = ["all"] * 2 if same_directory else [str(index - 1), str(index)]
            settings = {"index": index, "layout": layout, "load": directories[0], "save": directories[1]}
            self.complete(self._train, LAYOUTS[layout].size, **settings)

    @with_comms
    def _train(self) -> None:
        index, layout = self.settings["index"], self.settings["layout"]
        known = os.path.join(self.temp_dir, "known.pt")
        run = SavedRun(LAYOUTS[layout], seed=min(index, 1))
        if index:
            run.train(range(100, 101))
            expected = torch.load(known)
            self._check_all_differ(run, expected)
            run.load(os.path.join(self.temp_dir, self.settings["load"]))
            self.assertEqual(run.full(), expected, rtol=0, atol=0)
        actual = run.train(range(STEPS * index, STEPS * (index + 1))).full()
        self.assertEqual(actual, plain_run(range(STEPS * (index + 1))))
        run.save(os.path.join(self.temp_dir, self.settings["save"]))
        if self.rank == 0:
            torch.save(actual, known)
        self.assertEqual(from_first_rank(actual), actual, rtol=0, atol=0, may_be="same")

    @skip_if_lt_x_gpu(4)
    def test_other_numbers_of_ranks(self):
        """The world size changes between launches, and FSDP1 changes to FSDP2 and back. Some shards are empty."""
        self._check_restarts("FSDP1 on 4", "FSDP2 on 2", "FSDP2 on 4", "FSDP1 on 2", "plain", "FSDP1 on 4")

    @skip_if_lt_x_gpu(4)
    def test_other_dimensions(self):
        """The mesh changes between launches: FSDP, HSDP, TP, FSDP with TP, and back to FSDP."""
        self._check_restarts(
            "FSDP2 on 4", "FSDP2 on 2x2", "TP on 2", "FSDP2 and TP on 2x2", "FSDP1 on 2x2", "TP on 4", "FSDP2 on 2"
        )

    @skip_if_lt_x_gpu(4)
    def test_same_directory(self):
        """Each launch overwrites the previous checkpoint. Files that a launch on more ranks left are not loaded."""
        self._check_restarts("FSDP2 on 4", "FSDP2 on 2", "FSDP1 on 4", same_directory=True)


if __name__ == "__main__":
    run_tests()
