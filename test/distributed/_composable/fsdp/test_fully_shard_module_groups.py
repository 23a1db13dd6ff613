"""``fully_shard`` of a list of modules, if forward runs only some of them or uses them in unusual ways."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.fsdp import (
    MixedPrecisionPolicy,
    fully_shard,
)

from torch_fsdp_tests.common_distributed import needs, skip_if_lt_x_gpu
from torch_fsdp_tests.common_fsdp import (
    FSDPTest,
    check_sharded_parity,
)
from torch_fsdp_tests.common_utils import manual_seed, run_tests
from torch_fsdp_tests.defects import torch_defect
from torch_fsdp_tests.fsdp import collectives
from torch_fsdp_tests.fsdp.combinations import subtests
from torch_fsdp_tests.fsdp.references import average_gradients
from torch_fsdp_tests.fsdp.toy_models import ChunkedHeadModel, TwoBranches
from torch_fsdp_tests.fsdp.training import (
    FEW,
    Loop,
    TrainingMixin,
    backward,
    loss_of,
)
from torch_fsdp_tests.installed_torch import torch_facts

needs_partial_groups = needs(torch_facts.COMPLETES_PARTIAL_GROUPS)


class CallsHead(nn.Linear):
    """A layer that can also call a head. It returns its own output, and keeps the head's output."""

    kept: torch.Tensor

    def forward(self, x: torch.Tensor, head: nn.Module | None = None) -> torch.Tensor:
        output = super().forward(x)
        if head is not None:
            self.kept = head(output)
        return output


class BodyAndHead(nn.Module):
    """A model in which ``body`` and ``head`` are to be one group. ``how`` says how the head is used."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.embed, self.body, self.head = nn.Linear(8, 8), CallsHead(8, 8), nn.Linear(8, 8)
        self.head.requires_grad_(how != "frozen")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.how.startswith("called"):
            output = self.body(self.embed(x), self.head)
            return output + self.body.kept + (self.head(output) if self.how == "called twice" else 0)
        output, other = self.body(self.embed(x)), self.head(x)
        return output if self.how == "not in the loss" else output + other


class TestFullyShard1DTrainingCompose(TrainingMixin, FSDPTest):
    world_size = 2

    @skip_if_lt_x_gpu(2)
    def test_gradients_of_partial_group(self):
        """Gradients are right if the root's forward skips one layer of a group, and the layer then runs forward and
        backward alone.
        """
        manual_seed(42)
        ref_model = TwoBranches().to(self.device)
        model = self._replica(ref_model)
        fully_shard([model.left, model.right])
        fully_shard(model)
        self._seed()
        x = self._inputs(2, 8)
        for each in (ref_model, model):
            hidden = each(x, "left")
            leaf = hidden.detach().requires_grad_()
            for _ in range(2):
                each.right(leaf).sum().backward()
            hidden.backward(leaf.grad)
        average_gradients(ref_model)
        with torch_defect("fsdp2_partial_group_loses_gradients"):
            check_sharded_parity(self, ref_model, model)

    @needs_partial_groups
    @skip_if_lt_x_gpu(2)
    def test_partial_group_casts_output_of_root(self):
        """If forward skips a module of a group, the root's output is cast to the ``output_dtype`` of the group."""

        class NormAndHead(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.norm, self.head = nn.LayerNorm(8), nn.Linear(8, 8)

            def forward(self, x: torch.Tensor, skip_head: bool) -> torch.Tensor:
                hidden = self.norm(x).float()
                return hidden if skip_head else self.head(hidden).float()

        manual_seed(42)
        ref_model = NormAndHead().to(self.device)
        model = self._replica(ref_model)
        # The policy casts inputs to float32, so only the output's dtype shows it. The root does not have this policy.
        bf16 = MixedPrecisionPolicy(param_dtype=torch.float32, output_dtype=torch.bfloat16)
        fully_shard([model.norm, model.head], mp_policy=bf16)
        fully_shard(model)
        for linear in (ref_model.norm, ref_model.head):
            linear.register_forward_hook(lambda module, args, output: output.to(torch.bfloat16))

        def step(each: nn.Module, x: torch.Tensor) -> torch.Tensor:
            skipped, whole = each(x, skip_head=True), each(x, skip_head=False)
            if each is ref_model:
                skipped = skipped.to(torch.bfloat16)
            self.assertEqual((skipped.dtype, whole.dtype), (torch.bfloat16, torch.float32))
            return backward(loss_of(skipped) + loss_of(whole))

        self._check_training(ref_model, model, lambda: self._inputs(2, 8), Loop(step=step, iterations=FEW))

    @needs_partial_groups
    @skip_if_lt_x_gpu(2)
    def test_group_is_gathered_once_after_chunks(self):
        """Chunks leave a group before its last module has run. The next forward still gathers the group only once."""
        model = ChunkedHeadModel(8, 16, tie=False).to(self.device).shard()
        tokens = self._tokens(2, 4, vocab_size=16)
        for _ in range(2):
            with collectives.recorded() as calls:
                model(tokens)
            self.assertEqual(calls.counts()["all_gather"], 3)  # of the embedding, the body, the group of norm and head
            model.backward_in_chunks(model(tokens, skip_head=True), 2)

    @needs_partial_groups
    @skip_if_lt_x_gpu(2)
    def test_prefetch_after_chunks(self):
        """Chunks of a group do not change which all-gathers the backward of the layers before it prefetches."""

        def collectives_of_backward(in_chunks: bool) -> list[str]:
            layers = nn.Sequential(*(nn.Linear(8, 8, device=self.device) for _ in range(3)))
            norm, head = nn.LayerNorm(8, device=self.device), nn.Linear(8, 8, device=self.device)
            root = nn.Sequential(layers, norm)
            for each in (*layers, [norm, head], root):
                fully_shard(each)
            hidden = root(self._inputs(2, 8))
            for chunk in hidden.detach().requires_grad_().chunk(2) if in_chunks else ():
                head(chunk).sum().backward()
            with collectives.recorded() as calls:
                hidden.sum().backward()
            return [call.name for call in calls]

        self.assertEqual(collectives_of_backward(in_chunks=True), collectives_of_backward(in_chunks=False))


class TestFullyShardGroupsOfModules(TrainingMixin, FSDPTest):
    world_size = 2

    @skip_if_lt_x_gpu(2)
    @subtests(
        how=["in the loss", "not in the loss", "frozen", "called", "called twice"], reshard_after_forward=[True, False]
    )
    def test_head_of_a_group(self, how, reshard_after_forward):
        """A group is unsharded for the backward of each of its modules, however the last module is used."""
        manual_seed(42)
        ref_model = BodyAndHead(how).to(self.device)
        model = self._replica(ref_model)
        fully_shard([model.body, model.head], reshard_after_forward=reshard_after_forward)
        fully_shard(model)
        is_dropped = how == "called twice" or (reshard_after_forward and how != "in the loss")
        with torch_defect("fsdp2_group_is_gathered_for_one_output", when=is_dropped):
            self._check_training(ref_model, model, lambda: self._inputs(2, 8), Loop(iterations=FEW))


if __name__ == "__main__":
    run_tests()
