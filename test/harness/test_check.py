"""``python -m torch_fsdp_tests.check`` and ``ModelTestCase`` find mistakes, and name them."""

import functools
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from runs import COMMAND_LIMIT, INPUTS, ROOT, outputs

from torch_fsdp_tests.check import check_report, models_table
from torch_fsdp_tests.check.__main__ import main
from torch_fsdp_tests.check.checking import Checked
from torch_fsdp_tests.common_utils import TestCase, run_tests
from torch_fsdp_tests.models import ModelTestCase, comparing, configurations
from torch_fsdp_tests.models.advice import Expected, advice
from torch_fsdp_tests.models.configurations import INTERFACES, Configuration
from torch_fsdp_tests.models.endings import Ending
from torch_fsdp_tests.models.explaining import explaining
from torch_fsdp_tests.models.survey import Survey
from torch_fsdp_tests.verdict import State, Verdict

FILE = INPUTS / "models_to_check.py"
COMMAND = (sys.executable, "-m", "torch_fsdp_tests.check")
TEST_FILE = f"""
import sys
sys.path.insert(0, {str(INPUTS)!r})
import models_to_check
import torch
from torch_fsdp_tests.common_utils import run_tests

class TestScalar(models_to_check.Healthy):
    configurations = ("fsdp2", "fsdp2_clip")
    limits = {{"fsdp2": "scalar parameters"}}

    def build(self):
        model = super().build()
        model.scale = torch.nn.Parameter(torch.ones(()))
        return model

if __name__ == "__main__":
    run_tests()
"""
GRADIENTS = "the gradients of step 1: "
EARLY = "optimizer(params) returned an optimizer of other parameters"
sys.path.insert(0, str(INPUTS))


@functools.cache
def checked(
    only: str = "fsdp2_clip,fsdp2_ac,fsdp2_dsd",
    names: tuple[str, ...] = ("AveragesWrongly", "LosesMoments", "RecomputesDifferently", "tied"),
) -> tuple[int, dict[str, dict]]:
    """The exit status of a check of several models in these configurations, and its report by model."""
    models = [f"{FILE}:{name}" for name in names]
    done = subprocess.run(
        [*COMMAND, *models, "--only", only, "--json"], capture_output=True, text=True, timeout=COMMAND_LIMIT
    )
    return done.returncode, {model.partition(":")[2]: its for model, its in json.loads(done.stdout)["models"].items()}


def outcomes(model: str) -> dict[str, str]:
    return {name: its["outcome"] for name, its in checked()[1][model]["configurations"].items()}


class TestFindings(TestCase):
    """Without it, a check could pass whatever FSDP does."""

    def test_exit_status(self):
        self.assertEqual(checked()[0], 1)

    def test_wrong_average(self):
        self.assertEqual(
            outcomes("AveragesWrongly"), dict.fromkeys(("fsdp2_ac", "fsdp2_clip", "fsdp2_dsd"), "mismatch")
        )
        its = checked()[1]["AveragesWrongly"]["configurations"]["fsdp2_clip"]
        self.assertRegex(its["reason"], r"the gradients of step 1: 4 of 4 tensors are off .* \(2 times\)")
        self.assertEqual(its["alone"], "fsdp2 fails without any option")
        self.assertTrue(its["repeat"].endswith("models_to_check.py:AveragesWrongly --only fsdp2_clip"), its["repeat"])

    def test_moments_that_are_not_loaded(self):
        expected = {"fsdp2_ac": "passed", "fsdp2_clip": "passed", "fsdp2_dsd": "mismatch"}
        self.assertEqual(outcomes("LosesMoments"), expected)
        its = checked()[1]["LosesMoments"]["configurations"]["fsdp2_dsd"]
        self.assertIn("what training has changed after step 3", its["reason"])
        words = "in fsdp2_root_dsd, which loads; fsdp2 passes without these options"
        self.assertEqual(its["alone"], words)

    def test_what_not_all_configurations_show(self):
        """Gradients that ``summon_full_params`` does not show, buffers that are not loaded, an optimizer made early."""
        expected = {
            "AveragesWrongly": dict.fromkeys(("fsdp1_flat_frozen", "fsdp1_offload", "fsdp1_root_frozen"), GRADIENTS),
            "LosesBuffers": {"fsdp2_dsd": "the buffers after the load: 2 of 2 tensors are off"},
            "KeepsOptimizer": {"fsdp1_flat_frozen": EARLY, "fsdp2_dsd": EARLY},
        }
        _, found = checked("fsdp1_flat_frozen,fsdp1_offload,fsdp1_root_frozen,fsdp2_dsd", (*expected,))
        for name, words in expected.items():
            its = found[name]["configurations"]
            reasons = {each: its[each]["reason"].partition(start)[1] for each, start in words.items()}
            self.assertEqual(reasons, words)
            self.assertEqual({its[each]["outcome"] for each in words}, {"mismatch"})
        self.assertEqual(found["LosesBuffers"]["configurations"]["fsdp1_offload"]["outcome"], "passed")
        self.assertIn("optimizer(params) returns an optimizer of others", found["KeepsOptimizer"]["warnings"][0])

    def test_failure_without_fsdp(self):
        its = checked()[1]["RecomputesDifferently"]["configurations"]["fsdp2_ac"]
        self.assertEqual(its["outcome"], "fails_without_fsdp")
        self.assertRegex(its["reason"], "the plain model also raises CheckpointError")

    def test_tied_parameter(self):
        its = checked()[1]["tied"]
        self.assertEqual(len(its["warnings"]), 1)
        self.assertRegex(its["warnings"][0], "0.weight = 2.weight is one parameter in two units")
        self.assertNotEqual(outcomes("tied")["fsdp2_clip"], "passed")


class TestBlame(TestCase):
    """Without it, a check could blame FSDP for what the check does, or pass where nothing can fail."""

    def test_right_programs_pass(self):
        names = ("draws_in_its_dtype", "counts_calls", "leaves_a_thread", "shared", "on_meta", "of_two_dtypes")
        status, found = checked("fsdp2,fsdp2_eval", names)
        outcomes = {name: {each["outcome"] for each in found[name]["configurations"].values()} for name in names}
        self.assertEqual((status, outcomes), (0, {name: {"passed"} for name in names}))

    def test_what_shows_nothing_fails_without_fsdp(self):
        reasons = {
            "same_batches": "all ranks have the same gradients in step 1",
            "times_zero": "all gradients of the plain model in step 1 are zero",
            "not_finite": "the loss of the plain model in step 1 is nan",
            "remembers": "the plain program does not repeat",
            "Stands": "the optimizer changes no parameter in step 1",
        }
        status, found = checked("fsdp2", (*reasons,))
        self.assertEqual(status, 1)
        for name, words in reasons.items():
            its = found[name]["configurations"]["fsdp2"]
            self.assertEqual(its["outcome"], "fails_without_fsdp", msg=name)
            self.assertIn(words, its["reason"])

    def test_causes(self):
        causes = {
            "hooked": ("mismatch", "2.weight has a hook of register_hook"),
            "penalized": ("raised", "the loss calls torch.autograd.grad"),
            "sparse": ("raised", "0.weight has sparse gradients"),
            "borrows": ("raised", "0.0 runs while its unit does not"),
            "skips_in_the_model": ("raised", ""),
        }
        _, found = checked("fsdp2", (*causes, "other_units", "unused_input"))
        for name, (outcome, words) in causes.items():
            its = found[name]["configurations"]["fsdp2"]
            self.assertEqual(its["outcome"], outcome, msg=name)
            self.assertIn(words, "".join(each["means"] for each in its["explained"]))
        reasons = {name: found[name]["configurations"]["fsdp2"]["reason"] for name in ("other_units", "unused_input")}
        self.assertIn("rank 1 does not run 0 in step 1", reasons["other_units"])
        self.assertIn("first.weight, first.bias got a gradient of zeros from FSDP", reasons["unused_input"])

    def test_causes_that_not_both_interfaces_show(self):
        causes = {
            "DecaysMatrices": ("mismatch", "passed", "optimizer(params) makes groups by the number of dimensions"),
            "listed_twice": ("raised", "passed", "2 is a unit that has another name before"),
            "averages": ("raised", "mismatch", "1.mean is a parameter that forward writes to"),
        }
        _, found = checked("fsdp1,fsdp2", (*causes,))
        for name, (of_fsdp1, of_fsdp2, words) in causes.items():
            its = found[name]["configurations"]
            outcomes = its["fsdp1"]["outcome"], its["fsdp2"]["outcome"]
            self.assertEqual(outcomes, (of_fsdp1, of_fsdp2), msg=name)
            self.assertIn(words, its["fsdp1"]["explained"][0]["means"])
        self.assertIn("1.calls is a buffer that forward writes to", found["averages"]["warnings"][1])

    def test_dropped_options(self):
        """The rest of the configuration goes on."""
        _, found = checked("fsdp2_ac,fsdp2_frozen,fsdp2_ac_clip", ("without_units", "RecomputesDifferently"))
        its = found["without_units"]["configurations"]
        self.assertEqual({each["outcome"] for each in its.values()}, {"skipped", "partly"})
        self.assertIn("without ac: the model has no unit", its["fsdp2_ac_clip"]["without"][0])
        self.assertEqual(found["RecomputesDifferently"]["configurations"]["fsdp2_ac_clip"]["outcome"], "partly")

    def test_a_signal_ends_the_run_with_a_report(self):
        command = [*COMMAND, f"{FILE}:Healthy", f"{FILE}:sleeps", "--only", "fsdp2,fsdp2_clip"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
            for line in process.stderr or ():
                if "Healthy fsdp2_clip" in line:
                    break
            process.terminate()
            out, err = process.communicate(timeout=COMMAND_LIMIT)
        self.assertEqual(process.returncode, 143, err)
        self.assertRegex(out, r"(?s)fsdp2 +\..*2 configurations, 0 failed")
        self.assertIn("interrupted: 2 configurations did not end", err)


class TestArguments(TestCase):
    """Without it, a wrong argument could end in a traceback."""

    def test_rejections(self):
        for name, words in (
            ("model_alone", "returned a model alone: return (model, batch, loss)"),
            ("with_optimizer", "returned an optimizer, which holds the parameters from before sharding"),
            ("without_functions", "returned a Tensor for batch(step): return (model, batch, loss)"),
            ("raises", "raised KeyError: 'no such size'"),
            ("does_not_run", "the plain model does not run: RuntimeError: "),
            ("leaves", "ended its process: it exited with code 0"),
            ("exits", "raised SystemExit: 0"),
            ("without_loss", "loss(model, batch) returned a NoneType: return a tensor"),
            ("NUMBER", "is a int: name a subclass of ModelTestCase"),
            ("Heathy", "has no Heathy; did you mean Healthy?"),
        ):
            with self.subTest(name):
                self._check_rejected(f"{FILE}:{name}", says=words)
        self._check_rejected("no_such_module:f", says="there is no module no_such_module")
        self._check_rejected("no_such_file.py:f", says="there is no file no_such_file.py")
        self._check_rejected("mymodule", says="does not have the form MODULE:NAME")
        self._check_rejected(f"{FILE}:tied", "--only", "fsdp2_clipp", says="did you mean 'clip'?")

    def _check_rejected(self, *arguments: str, says: str) -> None:
        status, out, err = outputs(main, *arguments)
        self.assertEqual((status, out, len(err.splitlines())), (2, "", 1), err)
        self.assertIn(says, err)

    def test_help_has_an_example(self):
        _, out, _ = outputs(main, "--help")
        self.assertIn("python -m torch_fsdp_tests.check mymodule:factory", out)
        self.assertIn("activation checkpointing of each unit", out)


class TestReport(TestCase):
    """Without it, the table could show another result than the one that was found."""

    findings = (
        Checked("m:a", "fsdp2_clip", Ending.PASSED, 1.0),
        Checked("m:a", "fsdp1", Ending.SKIPPED, 0.0, "no room"),
        Checked("m:b", "fsdp2_clip", Ending.MISMATCH, 2.0, "the loss of step 1 is 2", "text", "fsdp2_clip"),
        Checked("m:b", "fsdp1", Ending.MISMATCH, 2.0, "the loss of step 1 is 2", "text"),
        Checked("m:a", "fsdp2_ac", Ending.PARTLY, 1.0, without=("without ac: the model has no unit",)),
    )
    surveys = {"m:a": Survey([], [], {}), "m:b": Survey(["0", "1"], [Expected("0", "fails.", "Do not.", ())], {})}

    def test_table_and_failures(self):
        self.assertExpectedInline(
            check_report.text(self.findings, self.surveys),
            """\
m:a: no unit found, so the root is the only one; define units(model) in a ModelTestCase
m:b: 2 units: 0, 1
expected for m:b: 0: fails. Do not.

           m:a
           | m:b
fsdp1      - M
fsdp2_ac   p
fsdp2_clip . M
. equals the plain model, p equals it, but an option was dropped, - skipped, M differs from the plain model

M m:b fsdp2_clip, fsdp1: the loss of step 1 is 2
    fsdp2_clip
    repeat: python -m torch_fsdp_tests.check m:b --only fsdp2_clip

m:a fsdp1: no room
m:a fsdp2_ac: without ac: the model has no unit

5 configurations, 2 failed, 1 skipped, in 6 s""",
        )

    def test_known_defect_of_an_error(self):
        text = "RuntimeError: Missing optimizer state for parameter 'a.weight' in checkpoint."
        ids = [each.id for each in explaining(Verdict(State.ERROR, text))]
        self.assertIn("dsd_optim_state_of_some_parameters_is_refused", ids)

    def test_pages(self):
        """``check --report`` and ``run_test.py --report`` have one table, with letters, causes and commands."""
        with tempfile.TemporaryDirectory() as folder:
            Path(folder, "test_it.py").write_text(TEST_FILE)
            run = [sys.executable, str(ROOT / "run_test.py"), "--test-directory", folder, "-i", "test_it"]
            check = [*COMMAND, f"{folder}/test_it.py:TestScalar"]
            for command, repeats in ((check, "--only fsdp2_clip"), (run, "-i test_it::TestScalar::test_fsdp2_clip")):
                with self.subTest(command[1]):
                    subprocess.run([*command, "--report", folder], capture_output=True, timeout=COMMAND_LIMIT)
                    page = re.sub("<[^>]*>", "", Path(folder, "report.html").read_text())
                    for words in (
                        r"(?s)configurationTestScalarfsdp2l *fsdp2_clipE *E .*:TestScalar fsdp2_clip: raised",
                        r"(limit|scale has no dimension): FSDP shards .* What to do: Give it one dimension",
                    ):
                        self.assertIsNotNone(re.search(words, page), words)
                    self.assertIn(repeats, page)

    def test_each_interface_is_in_the_table_of_a_run(self):
        result = {"outcome": "passed", "ranks": [], "reason": "", "repeat": ""}
        tests = [{"test": f"TestM.test_{name}", "configuration": {"name": name}, **result} for name in INTERFACES]
        (model,) = models_table.of_run(({"file": "f"}, test) for test in tests).values()
        self.assertEqual([*model["configurations"]], [*INTERFACES])


class TestConfigurations(TestCase):
    """Without it, a name could mean another configuration than it says."""

    def test_names(self):
        for name in (*configurations.COMBINED, *configurations.COMPILED):
            self.assertEqual(Configuration.parse(name).name, name)
        self.assertEqual(Configuration.parse("fsdp2_eval_ac").name, "fsdp2_ac_eval")
        for name in ("replicate_tp", "fsdp2_flat", "fsdp1_hsdp_noshard", "fsdp2_to_fsdp1", "fsdp2_dcp_to_fsdp1_ac"):
            with self.assertRaises(configurations.UnknownConfiguration, msg=name):
                Configuration.parse(name)

    def test_every_option_is_combined(self):
        combined = {option for name in configurations.COMBINED for option in Configuration.parse(name).options}
        others = {"root", "bf16reduce", "autocast", "compile", "tp", "noshard"}
        self.assertEqual(combined | others, {*configurations.OPTIONS})

    def test_program(self):
        program = Configuration.parse("fsdp1_flat_bf16_frozen_nosync_clip_dsd").program
        self.assertEqual((program.name, program.microbatches), ("plain_bf16_frozen_accumulate_clip", 3))
        self.assertEqual(Configuration.parse("fsdp2_hsdp_offload").program.name, "plain")
        self.assertEqual(Configuration.parse("fsdp2_bf16reduce_nosync").program.name, "plain_bf16reduce_accumulate")

    def test_resumed_in_the_named_layout(self):
        configuration = Configuration.parse("fsdp1_flat_clip_dcp_to_fsdp2_tp")
        self.assertEqual(configuration.name, "fsdp1_flat_clip_dcp_to_fsdp2_tp")
        self.assertEqual(configuration.resumed().name, "fsdp2_tp_clip_dcp")

    def test_resumed_in_another_layout(self):
        layouts = {name: Configuration.parse(name).resumed().name for name in ("fsdp1_flat_clip_dcp", "fsdp2_keep_dsd")}
        self.assertEqual(layouts, {"fsdp1_flat_clip_dcp": "fsdp2_clip_dcp", "fsdp2_keep_dsd": "fsdp2_root_keep_dsd"})


class TestTolerances(TestCase):
    """Without it, a difference could be within a tolerance that is too wide."""

    def test_a_tensor_is_compared_on_the_scale_of_all(self):
        expected = {"large": torch.tensor([1.0, 2.0]), "small": torch.tensor([1e-3])}
        pairs = {
            "large": (torch.tensor([1.0, 2.1]), expected["large"]),
            "small": (torch.tensor([2e-3]), expected["small"]),
        }
        with self.assertRaisesRegex(
            comparing.Mismatch, "2 of 2 tensors .* by more than 0.01 .* small by 0.05, large by 0.05"
        ):
            comparing.check_tensors("values", pairs, expected, 0.01, {})
        comparing.check_tensors("values", pairs, expected, 0.06, {})

    def test_a_number_that_is_not_finite_differs(self):
        with self.assertRaises(comparing.Mismatch):
            comparing.check_number("the loss", float("nan"), 1.0, 0.1)


class TestAdvice(TestCase):
    """Without it, an expected failure would be found only by running it."""

    def test_each_kind(self):
        class Strange(ModelTestCase):
            configurations = ()

            def build(self) -> torch.nn.Module:
                model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.MultiheadAttention(4, 2))
                model.register_parameter("scale", torch.nn.Parameter(torch.tensor(1.0)))
                return model

            def batch(self, step: int) -> torch.Tensor:
                return torch.ones(2, 4)

            def loss(self, model: torch.nn.Module, batch: torch.Tensor) -> torch.Tensor:
                first, attention = model.children()
                return attention(*[first(batch)] * 3)[0].sum() + 0 * model.scale

            def units(self, model: torch.nn.Module) -> list:
                return [model[1].out_proj]

        found = "\n".join(map(str, advice(Strange())))
        for words in (
            "scale has no dimension",
            "1.out_proj is a unit, but nn.MultiheadAttention",
            "loss(model, batch) does not call the model itself",
        ):
            self.assertIn(words, found)


if __name__ == "__main__":
    run_tests()
