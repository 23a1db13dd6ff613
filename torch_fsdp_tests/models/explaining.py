"""The known limits and defects that explain why a configuration failed."""

from __future__ import annotations

import itertools
from typing import NamedTuple

from torch_fsdp_tests.defects import limits, tracebacks
from torch_fsdp_tests.defects.registry import NO_WORKAROUND, Answer
from torch_fsdp_tests.models.configurations import Configuration
from torch_fsdp_tests.models.endings import Ending, ending_of
from torch_fsdp_tests.verdict import Verdict

_MOST = 2  # known defects that are named for one failure


class Explanation(NamedTuple):
    """What may be the cause: a limit of FSDP or a known defect of torch, by its id, and what to do."""

    kind: str
    id: str
    means: str
    advice: str

    @property
    def in_full(self) -> str:
        """One line, or two if there is something to do."""
        return f"{self.kind}: {self.means}" + f"\n    what to do: {self.advice}" * bool(self.advice)


def explaining(verdict: Verdict, configuration: Configuration | None = None) -> list[Explanation]:
    """What explains an error. A mismatch has no message of torch, so nothing explains it.

    A defect of the other interface of FSDP than that of the configuration does not.
    """
    kind, text = ending_of(verdict.outcome, verdict.ranks), verdict.in_full
    if kind in (Ending.MISMATCH, Ending.FAILS_WITHOUT_FSDP):
        return []
    found = [Explanation("limit", each.id, each.means, each.advice) for each in limits.explaining(text)[:1]]
    defects = tracebacks.raising(text) if kind is Ending.RAISED else []
    interface = configuration.interface if configuration else ""
    others = {"fsdp1": "fsdp2_", "fsdp2": "fsdp1_", "replicate": "fsdp1_"}.get(interface, "-")
    fitting = (defect for defect in defects if not defect.id.startswith(others))
    present = (defect for defect in fitting if defect.expected_here() is not Answer.ABSENT)
    return found + [
        Explanation("known defect", each.id, each.headline, each.workaround.replace(NO_WORKAROUND, ""))
        for each in itertools.islice(present, _MOST)
    ]
