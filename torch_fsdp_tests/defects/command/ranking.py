"""How well texts fit some words: BM25 over whole words, with a weight for each field of a text."""

from __future__ import annotations

import functools
import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence

K1 = 1.2  # BM25's saturation: how much a word counts that a text repeats
B = 0.8  # BM25's normalization by length: how much less a word counts in a long field
FITS = 1.33  # a text with a lower score is not shown, unless it has all words
BESIDE_THE_BEST = 0.5  # nor is a text with less than this share of the best score

# Words without information about a problem: those of any sentence, and those of any report.
_EMPTY = set(
    "a after all an and any are as at be been before by cannot do does for from has have if in into is it its no not of"
    " on one only or other than that the then this to was were when which while with without"
    " bug call crash error exception fail failure get give issue make problem python pytorch raise run torch use work"
    " broken build built called create created gave given gets gives got made makes making single using wrong".split()
)
# Words of reports, and what entries of the registry say instead.
_ALIKE = dict(
    pair.split(" = ")
    for pair in (
        "ac = activation checkpoint, amp = mixed precision, async = asynchronous, asynchronously = asynchronous, "
        "averaged = average, averaging = average, bf16 = bfloat16, cast = convert, ckpt = checkpoint, conversion = "
        "convert, corrupt = alter, deadlock = hang, deepcopy = copy, differ = diverge, disagree = diverge, "
        "disappear = lose, divisible = uneven, drop = lose, dropped = lose, ema = average, eval = no_grad, "
        "evaluation = no_grad, flipped = alter, fp16 = float16, fp32 = float32, fp64 = float64, frozen = freeze, "
        "fully_shard = fsdp2, fullyshardeddataparallel = fsdp1, gathered = unshard, gone = lose, gpu = rank, grad "
        "= gradient, host = cpu, hsdp = hybrid, inf = infinity, infinite = infinity, inplace = in place, int = "
        "integer, int64 = integer, int8 = integer, killed = interrupt, layer = module, lost = lose, lr = learning "
        "rate, miss = lose, missing = lose, modified = update, modify = update, momentum = state, optim = "
        "optimizer, overwrite = replace, overwritten = replace, parallelism = parallel, param = parameter, pp = "
        "pipeline, restore = load, resume = load, resuming = load, reverted = undo, scrambled = reorder, shared = "
        "share, stale = old, stuck = hang, submesh = smaller mesh, submodule = inner module, sync = synchronize, "
        "tied = share, tp = tensor parallel, twice = second, uint8 = integer, undone = undo, unevenly = uneven, "
        "unfreeze = freeze, unfrozen = freeze, validation = no_grad, vanish = lose, vocab = vocabulary, weight = "
        "parameter"
    ).split(", ")
)


def words(text: str) -> list[str]:
    """The stems of the words with information. An identifier and each of its parts are words."""
    return [stem for token in re.findall(r"\w+", text) for stem in _stems(token)]


@functools.cache
def _stems(token: str) -> tuple[str, ...]:
    parts = re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+", token)
    names = {token.strip("_"): None} | dict.fromkeys(parts if re.search(r"[a-z][A-Z]|_", token) else ())
    plain = [name.lower() for name in names if name]
    alike = [word for name in plain for word in _ALIKE.get(name.removesuffix("s"), _ALIKE.get(name, name)).split()]
    return tuple(_stem(word) for word in alike if not {word, _stem(word)} & _EMPTY)


def _stem(word: str) -> str:
    """Without the endings of plurals, participles and gerunds."""
    if len(word) > 3 and word.endswith("s") and not word.endswith(("ss", "us", "is")):
        word = f"{word[:-3]}y" if word.endswith("ies") else word[:-1]
    for ending in ("ing", "ed"):
        if word.endswith(ending) and len(word) > len(ending) + 3:
            word = re.sub(r"([^ls])\1$", r"\1", word.removesuffix(ending))
    return word[:-1] if len(word) > 4 and word.endswith("e") else word


class Ranking:
    """Texts to search. A text has fields, and each field has a weight."""

    def __init__(self, texts: Sequence[Mapping[str, str]], weights: Mapping[str, float]) -> None:
        split = [{field: words(text[field]) for field in weights} for text in texts]
        mean = {field: sum(len(text[field]) for text in split) / len(split) or 1.0 for field in weights}
        self._counts: list[Counter[str]] = []
        for text in split:
            counts: Counter[str] = Counter()
            for field, weight in weights.items():
                length = 1 - B + B * len(text[field]) / mean[field]
                for word in text[field]:
                    counts[word] += weight / length  # type: ignore[assignment]
            self._counts.append(counts)
        self._texts_with = Counter(word for counts in self._counts for word in counts)

    def best(self, query: str) -> list[int]:
        """The numbers of the texts that fit well, the best first.

        For a query of one word they keep their order, because one word does not show which text is best.
        """
        fits, stems = self.fits(query), {*words(query)}
        least = BESIDE_THE_BEST * max(fits)
        fitting = [
            number
            for number, fit in enumerate(fits)
            if fit >= least and fit > 0 and (fit >= FITS or stems <= self._counts[number].keys())
        ]
        return fitting if len(query.split()) == 1 else sorted(fitting, key=lambda number: -fits[number])

    def fits(self, query: str) -> list[float]:
        """How well each text fits, from 0.

        For the same score a long query needs more words in common than a short one, but not in proportion to its
        length, because reports contain much that no text has.
        """
        rarities = {word: self._rarity(word) for word in words(query)}
        norm = math.sqrt(sum(rarities.values())) or 1.0
        return [
            sum(rarity * text[word] / (K1 + text[word]) for word, rarity in rarities.items()) / norm
            for text in self._counts
        ]

    def _rarity(self, word: str) -> float:
        having = self._texts_with[word]
        return math.log(1 + (len(self._counts) - having + 0.5) / (having + 0.5))
