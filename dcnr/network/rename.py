"""A network file under another name: the text stays as it is, comments and all, but for the value of `name`."""

from __future__ import annotations

import yaml

from dcnr.errors import UserError
from dcnr.ids import NetworkId
from dcnr.network.yaml_tree import scalar


def renamed(text: str, name: NetworkId) -> str:
    """`text`, a network file that loads, with the name `name`. Raises `UserError` unless the old one stands plainly behind its key."""
    top = yaml.compose(text, Loader=yaml.SafeLoader)
    entries = top.value if isinstance(top, yaml.MappingNode) else ()
    for key, value in entries:
        if key.value == "name" and isinstance(value, yaml.ScalarNode):
            start, end, quote = value.start_mark.index, value.end_mark.index, value.style or ""
            if start > key.end_mark.index and text[start:end] == f"{quote}{value.value}{quote}":  # no alias, anchor or escape
                quote = quote or ("" if isinstance(scalar(name), str) else '"')
                return f"{text[:start]}{quote}{name}{quote}{text[end:]}"
    raise UserError("the name of the network does not stand behind its key as a plain word", "write it as `name: some-name`")
