"""Find paths through canvases: all that an engine needs, from a session to a batch of canvases."""

from canvas_grammar.automaton.configurations import NO_STATE, START
from canvas_grammar.automaton.explorer import Explorer
from canvas_grammar.automaton.parts import Part
from canvas_grammar.automaton.tables import dead_state
from canvas_grammar.decoding.best_path import CanvasWindow, ConstrainedPath, FreeTokens
from canvas_grammar.decoding.path_finder import PathStep, PlannedCanvas, path_finder, warm_up
from canvas_grammar.decoding.session import DistantSession, Session

__all__ = [
    "NO_STATE", "START", "CanvasWindow", "ConstrainedPath", "DistantSession", "Explorer",
    "FreeTokens", "Part", "PathStep", "PlannedCanvas", "Session", "dead_state", "path_finder",
    "warm_up",
]  # fmt: skip
