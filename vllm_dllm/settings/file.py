"""A settings file: YAML read as data, within limits, and never as something else than is written.

YAML can do more than a list of settings needs, and each of these extras has hurt somebody: tags
that run code, aliases that grow without end, a name that stands twice, ``010`` that means eight.
"""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_dllm.settings.ranges import SettingsError, shown

if TYPE_CHECKING:
    import yaml

# A thousand times what anybody needs, and still read within a second or two.
MAX_FILE_BYTES = 1 << 16

# What YAML 1.1 reads in base 2, 8, 16 or 60, or with digits grouped: 0b1, 010, 0x1f, 1:30, 1_000.
_NOT_DECIMAL = re.compile(r"[-+]?0[0-9bxoBXO]|.*[_:]")
# What YAML 1.1 takes for text unless there is a point before and a sign behind the e.
_WITH_EXPONENT = re.compile(r"[-+]?[0-9]+(\.[0-9]*)?[eE][-+]?[0-9]+$")


def read_settings_file(path: object) -> dict[str, Any]:
    """The settings of a YAML file; an empty one has none.

    Raises:
        SettingsError: unreadable, too large, no mapping; the message names ``dllm.config``.
    """
    import yaml

    if not isinstance(path, str):
        raise SettingsError(f"dllm.config must be the path of a YAML file, got {shown(path)}")
    try:
        content = yaml.load(_text(Path(path)), Loader=_loader())
    except Exception as error:  # bad scalars leave PyYAML as KeyError, IndexError, ...
        raise SettingsError(f"dllm.config: cannot read {shown(path)}: {error}") from error
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise SettingsError(f"dllm.config: {shown(path)} must hold a mapping of settings")
    return content


def _text(file: Path) -> str:
    if file.exists() and not file.is_file():
        raise ValueError("not a regular file")  # to open a pipe would wait for its writer
    with file.open("rb") as stream:
        raw = stream.read(MAX_FILE_BYTES + 1)  # the size that is stated may be another
    if len(raw) > MAX_FILE_BYTES:
        raise ValueError(f"larger than {MAX_FILE_BYTES} bytes")
    return raw.decode("utf-8")


def _loader() -> type[yaml.SafeLoader]:
    """PyYAML's safe loader, without aliases, duplicate names and numbers that are not decimal."""
    import yaml

    def refusal(problem: str, mark: Any) -> Exception:
        return yaml.MarkedYAMLError(problem=problem, problem_mark=mark)

    class Loader(yaml.SafeLoader):
        """One for each file: constructors are registered on a class."""

        def compose_node(self, parent: Any, index: Any) -> Any:
            if self.check_event(yaml.AliasEvent):
                raise refusal("aliases (*) are not supported", self.peek_event().start_mark)
            return super().compose_node(parent, index)

        def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
            made = super().construct_mapping(node, deep)
            if len(made) < len(node.value):
                names = Counter(self.construct_object(name, deep=True) for name, _ in node.value)
                twice = names.most_common(1)[0][0]
                raise refusal(f"{shown(twice)} is set twice", node.start_mark)
            return made

        def construct_decimal(self, node: Any) -> Any:
            text = self.construct_scalar(node)
            if _NOT_DECIMAL.match(text):
                raise refusal(f"{shown(text)} is not a plain decimal number", node.start_mark)
            return NUMBERS[node.tag](self, node)

    NUMBERS = {  # noqa: N806 - a constant of the class above
        "tag:yaml.org,2002:int": yaml.SafeLoader.construct_yaml_int,
        "tag:yaml.org,2002:float": yaml.SafeLoader.construct_yaml_float,
    }
    for tag in NUMBERS:
        Loader.add_constructor(tag, Loader.construct_decimal)
    Loader.add_implicit_resolver("tag:yaml.org,2002:float", _WITH_EXPONENT, list("-+0123456789"))
    return Loader
