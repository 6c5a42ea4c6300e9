"""Why a schema allows no value: the innermost places whose keywords exclude each other."""

from __future__ import annotations

from canvas_grammar.grammar.json.expansion import Expansion
from canvas_grammar.grammar.json.layout import short
from canvas_grammar.grammar.json.parts import Literal, place_of
from canvas_grammar.limits import ConstraintError

MOST_NAMED = 3  # places of a message
DEEPEST = 64

Conditions = tuple[Literal, ...]


class Contradictions:
    """Conditions that no value meets, those on inner places first."""

    def __init__(self, expansion: Expansion) -> None:
        self.expansion = expansion
        self._found: dict[str, Conditions] = {}

    def add(self, literals: Conditions) -> None:
        """No value meets some conditions; a place counts only if none inside it was found."""
        place = place_of(literals)
        if not any(f"{inner}.".startswith(f"{place}.") for inner in self._found):
            self._found[place] = literals

    def error(self, refusal: str) -> ConstraintError:
        """A refusal of the schema, with places, keywords, and negations left unsaid."""
        named = map(self._named, list(self._found.values())[:MOST_NAMED])
        why = [
            f" (at {short(part.place)} it cannot be expressed that this does not hold: "
            f"{', '.join(words)})"
            for part, words in list(self.expansion.left_out.items())[:MOST_NAMED]
        ]
        places = "; ".join(dict.fromkeys(named))
        return ConstraintError(f"{places}: {refusal}{''.join(why)}")

    def _named(self, literals: Conditions) -> str:
        for _ in range(DEEPEST):
            inner = self.expansion.impossible_part(literals)
            if not inner:
                break
            literals = inner
        words = [word for literal in literals for word in _keywords(literal)]
        return f"{short(place_of(literals))}: {', '.join(dict.fromkeys(words))}"


def _keywords(literal: Literal) -> list[str]:
    if literal.negated:
        return ["not"]
    return list(literal.part.keywords) or ["false"]
