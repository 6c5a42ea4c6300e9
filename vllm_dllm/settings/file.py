"""Read a settings file: YAML as plain data, of limited size, without YAML's surprises.

YAML can do more than a list of settings needs. Its harmful extras are refused: tags that run code,
aliases that expand without end, duplicate names, and numbers such as ``010`` that mean eight.
"""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_dllm.ranges import SettingsError, shown

if TYPE_CHECKING:
    import yaml

# This is far more than any list of settings needs, and is still read within a second or two.
MAX_FILE_BYTES = 1 << 16

# Numbers that YAML 1.1 reads in base 2, 8, 16 or 60, or with digits grouped: 0b1, 010, 0x1f, 1:30,
# 1_000.
_NOT_DECIMAL = re.compile(r"[-+]?0[0-9bxoBXO]|.*[_:]")
# Numbers with an exponent. YAML 1.1 reads them as text unless they have a point before the e and a
# sign after it.
_WITH_EXPONENT = re.compile(r"[-+]?[0-9]+(\.[0-9]*)?[eE][-+]?[0-9]+$")


def read_settings_file(path: object) -> dict[str, Any]:
    """The settings in a YAML file, by name; none for an empty file.

    Raises:
        SettingsError: the file is unreadable, too large, or not a mapping; the message names
            ``dllm.config``.
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
        raise ValueError("not a regular file")  # opening a pipe would wait for its writer
    with file.open("rb") as stream:
        raw = stream.read(MAX_FILE_BYTES + 1)  # the size that the file system reports may be wrong
    if len(raw) > MAX_FILE_BYTES:
        raise ValueError(f"larger than {MAX_FILE_BYTES} bytes")
    return raw.decode("utf-8")


def _loader() -> type[yaml.SafeLoader]:
    """PyYAML's safe loader, without aliases, duplicate names and numbers that are not decimal."""
    import yaml

    def refusal(problem: str, mark: Any) -> Exception:
        return yaml.MarkedYAMLError(problem=problem, problem_mark=mark)

    class Loader(yaml.SafeLoader):
        """Make a class for each file, because constructors are registered on a class."""

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
