"""Find paths through canvases: all that an engine needs, from a session to a batch of canvases."""

from canvas_grammar.automaton.configurations import NO_STATE, START
from canvas_grammar.decoding.best_path import CanvasWindow, ConstrainedPath, FreeTokens
from canvas_grammar.decoding.path_finder import PathStep, PlannedCanvas, path_finder, warm_up
from canvas_grammar.decoding.session import Part, Session
from canvas_grammar.decoding.tables import dead_state

__all__ = [
    "NO_STATE", "START", "CanvasWindow", "ConstrainedPath", "FreeTokens", "Part", "PathStep",
    "PlannedCanvas", "Session", "dead_state", "path_finder", "warm_up",
]  # fmt: skip
