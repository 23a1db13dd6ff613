# Owner(s): ["oncall: distributed"]
"""FSDP1's streams wait for each other when they share memory. The test needs no accelerator."""

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import BackwardPrefetch, CPUOffload, MixedPrecision, ShardingStrategy, StateDictType
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

from torch_fsdp_tests.common_distributed import skip_if_lt_x_gpu
from torch_fsdp_tests.common_fsdp import MLP, FSDPTest
from torch_fsdp_tests.common_utils import manual_seed, run_tests
from torch_fsdp_tests.defects import torch_defect
from torch_fsdp_tests.device import accelerator
from torch_fsdp_tests.extensions.races.ordering import check_order, recorded, sees_collectives
from torch_fsdp_tests.fsdp.combinations import subtests

DIM = 8


class Layers(nn.Sequential):
    """Its forward may leave out layers."""

    def forward(self, x: torch.Tensor, used: tuple[int, ...] = (0, 1, 2)) -> torch.Tensor:
        for index in used:
            x = self[index](x)
        return x


class StreamOrderTest(FSDPTest):
    def _check_layer_of_no_sync(self, *host_waits: str, **kwargs: Any) -> None:
        """Check the order if only microbatches without synchronization use the second of three layers."""

        def build():
            manual_seed(42)
            layers = (FSDP(MLP(DIM), device_id=self.device, **kwargs) for _ in range(3))
            return FSDP(Layers(*layers), device_id=self.device, **kwargs)

        def step(model):
            inp = torch.randn(4, DIM, device=self.device)
            with model.no_sync():
                model(inp).sum().backward()
            model(inp, used=(0, 2)).sum().backward()

        is_offloaded = "cpu_offload" in kwargs and kwargs["cpu_offload"].offload_params
        with torch_defect("fsdp1_gradient_of_no_sync_is_not_reduced", when=not is_offloaded):
            self._check_order(build, step, *host_waits)

    def _wrap(self, has_own: bool = True, **kwargs: Any) -> FSDP:
        manual_seed(42)
        kwargs["device_id"] = self.device
        own = [nn.Linear(DIM, DIM)] if has_own else []
        return FSDP(nn.Sequential(*(FSDP(MLP(DIM), **kwargs) for _ in range(3)), *own), **kwargs)

    def _check_order(self, build: Callable[[], FSDP], step: Callable[[Any], object], *host_waits: str) -> None:
        """Check the order. The host also waits for events, because ``limit_all_gathers`` is on by default."""
        check_order(self, build, step, {"event", *host_waits})

    def _train(self, model: nn.Module) -> None:
        model(torch.randn(4, DIM, device=self.device)).sum().backward()


class TestStreamOrder(StreamOrderTest):
    world_size = 2

    @skip_if_lt_x_gpu(2)
    @subtests(
        pairwise=True,
        sharding_strategy=[ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP, ShardingStrategy.NO_SHARD],
        mixed_precision=[None, MixedPrecision(param_dtype=torch.bfloat16)],
        use_orig_params=[False, True],
        limit_all_gathers=[False, True],
        forward_prefetch=[False, True],
        backward_prefetch=[None, BackwardPrefetch.BACKWARD_PRE, BackwardPrefetch.BACKWARD_POST],
    )
    def test_training(self, **config):
        frees = config["sharding_strategy"] is not ShardingStrategy.NO_SHARD
        waits = ["event"] if config["limit_all_gathers"] and frees else []
        check_order(self, lambda: self._wrap(**config), self._train, waits)

    @skip_if_lt_x_gpu(2)
    @subtests(use_orig_params=[False, True])
    def test_microbatches(self, use_orig_params):
        """Reductions are deferred, and the last of several backwards reduces the accumulated gradients."""

        def step(model):
            for context in (model.no_sync, model.no_sync, contextlib.nullcontext):
                with context():
                    self._train(model)
            model.clip_grad_norm_(0.5)

        self._check_order(lambda: self._wrap(use_orig_params=use_orig_params), step)

    @skip_if_lt_x_gpu(2)
    @subtests(
        sharding_strategy=[ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP],
        mixed_precision=[None, MixedPrecision(param_dtype=torch.bfloat16)],
        use_orig_params=[False, True],
    )
    def test_offload(self, **config):
        """The host waits for gradients that are copied to its pinned memory, before it takes a step."""
        offload = CPUOffload(offload_params=True)
        self._check_order(lambda: self._wrap(cpu_offload=offload, **config), self._train, "stream")

    @skip_if_lt_x_gpu(2)
    @subtests(offloads=[False, True])
    def test_layer_that_is_used_only_in_no_sync(self, offloads):
        waits = ["stream"] if offloads else []
        self._check_layer_of_no_sync(*waits, cpu_offload=CPUOffload(offload_params=offloads))

    @skip_if_lt_x_gpu(2)
    @subtests(use_orig_params=[False, True])
    def test_whole_parameters_between_steps(self, use_orig_params):
        def step(model):
            self._train(model)
            with FSDP.summon_full_params(model):
                for param in model.parameters():
                    param.detach().mul_(0.5)
            model.state_dict()
            with torch.no_grad():
                model(torch.randn(4, DIM, device=self.device))

        self._check_order(lambda: self._wrap(use_orig_params=use_orig_params), step, "device")

    @skip_if_lt_x_gpu(2)
    @subtests(mixed_precision=[None, MixedPrecision(param_dtype=torch.bfloat16)])
    def test_parameters_opened_before_backward(self, mixed_precision):
        """Backward all-gathers the shards after ``summon_full_params`` has written them."""

        def step(model):
            loss = model(torch.randn(4, DIM, device=self.device)).sum()
            with FSDP.summon_full_params(model):
                pass
            loss.backward()

        is_seen = mixed_precision is not None or sees_collectives()  # the cast of the shards, or their all-gather
        with torch_defect("fsdp1_opened_parameters_race_with_backward", when=is_seen):
            waits = {"limit_all_gathers": False}  # if on, the host may happen to wait for the right event
            check_order(self, lambda: self._wrap(mixed_precision=mixed_precision, **waits), step, {"device"})

    @skip_if_lt_x_gpu(2)
    @subtests(waits=[True, False], use_orig_params=[True, False])
    def test_unshard_ahead(self, waits, use_orig_params):
        def step(model):
            self._train(model)
            handles = [layer._unshard(async_op=True) for layer in model.module[:3]]
            for handle in handles if waits else []:
                handle.wait()
            for layer in model.module[:3] if waits and not use_orig_params else []:
                sum(param.detach().sum() for param in layer.parameters())
            self._train(model)

        with torch_defect("fsdp1_unshard_handle_waits_for_a_stream", when=waits and not use_orig_params):
            self._check_order(lambda: self._wrap(has_own=False, use_orig_params=use_orig_params), step)

    @skip_if_lt_x_gpu(2)
    @subtests(dropped=["one", "all"], ahead=[False, True])
    def test_gradients_dropped_by_the_user(self, dropped, ahead):
        """If the user sets a parameter's gradient to None, FSDP1 zeroes its part of the flat gradient."""

        def step(model):
            self._train(model)
            for param in list(model.parameters())[: None if dropped == "all" else 1]:
                param.grad = None
            if ahead:
                model._wait_unshard_streams_on_current_stream()
                for layer in model.module:
                    layer._unshard()
            self._train(model)

        with torch_defect("fsdp1_dropped_gradients_race_with_the_reduction", when=dropped == "one" or ahead):
            self._check_order(lambda: self._wrap(has_own=False, use_orig_params=True), step)

    @skip_if_lt_x_gpu(2)
    @subtests(kind=[StateDictType.FULL_STATE_DICT, StateDictType.SHARDED_STATE_DICT, StateDictType.LOCAL_STATE_DICT])
    def test_states_between_steps(self, kind):
        has_optim_states = kind != StateDictType.LOCAL_STATE_DICT

        def step(model):
            self._train(model)
            optim = torch.optim.Adam(model.parameters(), lr=1e-2)
            optim.step()
            with FSDP.state_dict_type(model, kind):
                model.load_state_dict(model.state_dict())
                if has_optim_states:
                    optim.load_state_dict(
                        FSDP.optim_state_dict_to_load(model, optim, FSDP.optim_state_dict(model, optim))
                    )

        waits = ["device", "copy", "value"] if accelerator.current().has("device_memory") else ["device"]
        self._check_order(lambda: self._wrap(use_orig_params=has_optim_states), step, *waits)

    @skip_if_lt_x_gpu(2)
    def test_scaled_gradients(self):
        def step(model):
            scaler = ShardedGradScaler(device=self.device.type)
            optim = torch.optim.SGD(model.parameters(), lr=1e-2)
            scaler.scale(model(torch.randn(4, DIM, device=self.device)).sum()).backward()
            scaler.step(optim)
            scaler.update()

        waits = ["value"] if accelerator.current().has("device_memory") else []
        self._check_order(self._wrap, step, *waits)

    @skip_if_lt_x_gpu(2)
    @subtests(action=["gather", "save", "load"])
    def test_host_waits_for_the_device(self, action):
        model = self._wrap()
        self._train(model)
        with FSDP.state_dict_type(model, StateDictType.LOCAL_STATE_DICT):
            state = model.state_dict()
            with recorded() as recording:
                match action:
                    case "gather":
                        with FSDP.summon_full_params(model):
                            pass
                    case "save":
                        model.state_dict()
                    case "load":
                        model.load_state_dict(state)
        self.assertGreater(recording.host_waits["device"], 0)


class TestStreamOrderHybrid(StreamOrderTest):
    world_size = 4

    @skip_if_lt_x_gpu(4)
    @subtests(
        pairwise=True,
        sharding_strategy=[ShardingStrategy.HYBRID_SHARD, ShardingStrategy._HYBRID_SHARD_ZERO2],
        use_orig_params=[False, True],
        accumulate=["no", "unreduced", "reduced"],
    )
    def test_training(self, sharding_strategy, use_orig_params, accumulate):
        mesh = init_device_mesh(self.device.type, (2, 2), mesh_dim_names=("replicate", "shard"))

        def step(model):
            if accumulate != "no":
                with model.no_sync() if accumulate == "unreduced" else contextlib.nullcontext():
                    self._train(model)
            self._train(model)

        strategy = {"device_mesh": mesh, "sharding_strategy": sharding_strategy}
        self._check_order(lambda: self._wrap(**strategy, use_orig_params=use_orig_params), step)

    @skip_if_lt_x_gpu(4)
    def test_layer_that_is_used_only_in_no_sync(self):
        mesh = init_device_mesh(self.device.type, (2, 2), mesh_dim_names=("replicate", "shard"))
        self._check_layer_of_no_sync(device_mesh=mesh, sharding_strategy=ShardingStrategy.HYBRID_SHARD)


if __name__ == "__main__":
    run_tests()
