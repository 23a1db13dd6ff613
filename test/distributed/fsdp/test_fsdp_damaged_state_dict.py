"""Loading of FSDP1 state dicts, also with missing, unexpected or wrongly shaped values."""

from __future__ import annotations

import copy

from torch.distributed.fsdp import ShardingStrategy

from torch_fsdp_tests.common_distributed import skip_if_lt_x_gpu
from torch_fsdp_tests.common_fsdp import FSDPTestContinuous
from torch_fsdp_tests.common_utils import run_tests
from torch_fsdp_tests.defects import torch_defect
from torch_fsdp_tests.fsdp.combinations import subtests
from torch_fsdp_tests.fsdp.fsdp1_state_dicts import FORMS, StateDictMixin, summoned
from torch_fsdp_tests.fsdp.internals import clean_name
from torch_fsdp_tests.installed_torch import torch_names

unshard_utils = torch_names.module("torch.distributed.fsdp._unshard_param_utils")


class TestFSDPStateDict(StateDictMixin, FSDPTestContinuous):
    world_size = 2

    @skip_if_lt_x_gpu(2)
    @subtests(form=FORMS, damage=["missing", "unexpected", "shape"])
    def test_damaged_state_dict(self, form, damage):
        """Every rank gets an error that names the mismatch, and the rest is loaded.

        As with plain modules, matching values are loaded before the error is raised. The values that the error names
        are unchanged, no parameter stays unsharded, and forward works. The state dict itself does not change.
        """
        kind, use_orig_params = form
        plain = self._uneven_layers()
        wrap_kwargs = {"use_orig_params": use_orig_params}
        model = self._wrapped(copy.deepcopy(plain), **wrap_kwargs)
        source = self._uneven_layers(seed=1)
        state_dict = self._save(self._wrapped(copy.deepcopy(source), **wrap_kwargs), kind)
        damaged = f"2.{unshard_utils.FLAT_PARAM if kind == 'local_state_dict' else 'weight'}"
        errors: dict[str, tuple[type[Exception], str]] = {
            "missing": (RuntimeError, f'Missing key(s) in state_dict: "{damaged}".'),
            "unexpected": (RuntimeError, 'Unexpected key(s) in state_dict: "2.scale".'),
            "shape": (RuntimeError, f"size mismatch for {damaged}"),
        }
        if damage == "missing":
            del state_dict[damaged]
            if kind == "local_state_dict":
                errors["missing"] = AssertionError, "No `FlatParameter` in `state_dict` for this FSDP instance"
        elif damage == "unexpected":
            state_dict["2.scale"] = copy.deepcopy(state_dict[damaged])
        else:
            wider = self._save(self._wrapped(self._uneven_layers(hidden=9), **wrap_kwargs), kind)
            state_dict[damaged] = wider[damaged]
        before = dict(state_dict)

        error, words = errors[damage]
        with self._mode(model, kind):
            try:
                model.load_state_dict(state_dict)
            except error as raised:
                self.assertIn(words, clean_name(str(raised)))
            else:
                self.fail(f"loaded a state dict with a damage: {damage}")
        self.assertEqual(list(state_dict), list(before))
        self.assertTrue(all(state_dict[name] is before[name] for name in before))
        self._assert_resharded(model)

        kept = {} if damage == "unexpected" else {"2.weight"}
        if kept and kind == "local_state_dict":
            kept = {"2.weight", "2.bias"}
        expected = copy.deepcopy(source)
        expected.load_state_dict({name: plain.state_dict()[name] for name in kept}, strict=False)
        self.assertEqual(summoned(model), dict(expected.state_dict()), rtol=0, atol=0)
        rows = self._rows(2, 3)
        self.assertEqual(model(rows), expected(rows))

    @skip_if_lt_x_gpu(2)
    @subtests(
        strategy=[ShardingStrategy.FULL_SHARD, ShardingStrategy.NO_SHARD],
        use_orig_params=[False, True],
        assign=[False, True],
    )
    def test_load_replaces_all_values(self, strategy, use_orig_params, assign):
        """A model that has loaded a state dict computes like its source, whether values are copied or assigned."""
        source = self._uneven_layers(seed=1)
        model = self._wrapped(self._uneven_layers(), sharding_strategy=strategy, use_orig_params=use_orig_params)
        result = model.load_state_dict(source.state_dict(), assign=assign)
        self.assertEqual((result.missing_keys, result.unexpected_keys), ([], []), may_be="empty")
        rows = self._rows(2, 3)
        output, expected = model(rows), source(rows)
        unflattened = strategy is ShardingStrategy.NO_SHARD and use_orig_params
        with torch_defect("fsdp1_assigned_state_dict_is_lost", when=assign and not unflattened):
            self.assertEqual(output, expected)


if __name__ == "__main__":
    run_tests()
