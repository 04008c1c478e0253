"""From the bytes of a plan file to YAML nodes with positions, refusing what could mislead a reader."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import yaml

from dtplan._errors import Diagnostic, PlanError
from dtplan.plan.spec import Place

MAX_BYTES = 1 << 20
MAX_DEPTH = 32


class Source:
    """One file's text, and the places of its nodes."""

    def __init__(self, text: str, file: str) -> None:
        self.file = file
        self._lines = text.splitlines()

    def place(self, node: yaml.Node) -> Place:
        """Where ``node`` starts."""
        return self._place(node.start_mark)

    def finding(self, code: str, where: Place | yaml.Node | yaml.Mark, message: str, hint: str = "") -> Diagnostic:
        """A diagnostic at a place, a node or a YAML mark of this file."""
        if isinstance(where, yaml.Node):
            where = where.start_mark
        place = where if isinstance(where, Place) else self._place(where)
        return finding_at(code, place, message, hint)

    def _place(self, mark: yaml.Mark) -> Place:
        line = self._lines[mark.line] if mark.line < len(self._lines) else ""
        return Place(self.file, mark.line + 1, mark.column + 1, line)


def finding_at(code: str, place: Place, message: str, hint: str = "") -> Diagnostic:
    """A diagnostic at ``place``."""
    return Diagnostic(
        code=code, message=message, hint=hint, file=place.file, line=place.line, column=place.column, source=place.source
    )


def compose(path: Path, shown: str | None = None) -> tuple[Source, yaml.MappingNode]:
    """Read ``path`` into its root mapping.

    Raises:
        PlanError: the file cannot be read, is not UTF-8 text, is empty, is not one YAML mapping, holds an
            alias, a tag or a duplicate key, or is larger than 1 MiB or nested deeper than 32 levels.
    """
    return compose_text(_text(path, shown or str(path)), shown or str(path))


def compose_text(text: str, file: str) -> tuple[Source, yaml.MappingNode]:
    """As ``compose``, for text that is already in memory."""
    source = Source(text, file)
    loader = _Loader(text)
    try:
        node = loader.get_single_node()
    except _Refused as refused:
        raise PlanError([source.finding(refused.code, refused.mark, refused.message, refused.hint)]) from None
    except yaml.MarkedYAMLError as error:
        raise PlanError([_syntax_finding(source, error)]) from None
    except yaml.YAMLError as error:  # a reader error: a control character, with an offset but no mark
        message = f"not YAML: {str(error).splitlines()[0]}"
        raise PlanError([Diagnostic(code="DTP104", file=file, message=message)]) from None
    finally:
        loader.dispose()
    if node is None:
        raise PlanError([_empty(file)])
    if not isinstance(node, yaml.MappingNode):
        message = "a plan is a mapping of keys to values"
        raise PlanError([source.finding("DTP202", node, message, "begin the file with `dtplan: 1`")])
    if duplicates := list(_duplicates(source, node)):
        raise PlanError(duplicates)
    return source, node


def _text(path: Path, shown: str) -> str:
    try:
        with path.open("rb") as stream:
            data = stream.read(MAX_BYTES + 1)
    except OSError as error:
        message = f"cannot read the plan: {error.strerror or error}"
        hint = "give a plan file or the name of a built-in plan (`dtplan list` shows them)"
        raise PlanError([Diagnostic(code="DTP101", file=shown, message=message, hint=hint)]) from None
    if len(data) > MAX_BYTES:
        message = f"the file is larger than {MAX_BYTES} bytes"
        raise PlanError([Diagnostic(code="DTP107", file=shown, message=message, hint="a plan fits on a screen or two")])
    if b"\0" in data:
        raise PlanError([Diagnostic(code="DTP102", file=shown, message="the file is binary, a plan is YAML text")])
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        column = error.start - (data.rfind(b"\n", 0, error.start) + 1) + 1
        message = f"byte 0x{data[error.start]:02x} is not UTF-8"
        hint = "save the file as UTF-8"
        found = Diagnostic(code="DTP102", file=shown, line=line, column=column, message=message, hint=hint)
        raise PlanError([found]) from None
    if not text.strip():
        raise PlanError([_empty(shown)])
    return text


def _empty(file: str) -> Diagnostic:
    return Diagnostic(code="DTP103", file=file, message="the plan is empty", hint="begin with `dtplan: 1`")


class _Refused(Exception):
    def __init__(self, code: str, mark: yaml.Mark, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.code, self.mark, self.message, self.hint = code, mark, message, hint


class _Loader(yaml.SafeLoader):
    """Composes nodes and never constructs objects; aliases, anchors and tags are refused."""

    _depth = 0

    def compose_node(self, parent: yaml.Node | None, index: object) -> yaml.Node | None:
        event = self.peek_event()
        if isinstance(event, yaml.AliasEvent):
            hint = 'a path that begins with `*` must be quoted: "*.q_proj"; YAML aliases are not part of the language'
            raise _Refused("DTP106", event.start_mark, f"alias `*{event.anchor}`", hint)
        if getattr(event, "anchor", None) is not None:
            raise _Refused("DTP106", event.start_mark, f"anchor `&{event.anchor}`", "write the value out, or use `extends`")
        tag = getattr(event, "tag", None)
        if tag is not None:
            raise _Refused("DTP106", event.start_mark, f"tag `{tag}`", "a plan holds plain values only")
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise _Refused("DTP107", event.start_mark, f"nested deeper than {MAX_DEPTH} levels")
        node: yaml.Node | None = super().compose_node(parent, index)  # type: ignore[no-untyped-call]
        self._depth -= 1
        return node


def _syntax_finding(source: Source, error: yaml.MarkedYAMLError) -> Diagnostic:
    mark = error.problem_mark or error.context_mark
    problem = error.problem or "cannot be read"
    hint = ""
    if "'\\t'" in problem or (mark is not None and mark.buffer is not None and mark.get_snippet(max_length=400).find("\t") >= 0):
        hint = "indent with spaces: YAML does not allow tabs"
    elif "expected alphabetic or numeric character" in problem:
        problem, hint = "`*` at the start of a key reads as a YAML alias", 'quote the key: "*.q_proj"'
    elif "another document" in problem or "but found another" in problem:
        hint = "one plan a file: remove the `---` in between"
    return source.finding("DTP104", mark, f"not YAML: {problem}", hint)


def _duplicates(source: Source, node: yaml.Node) -> Iterator[Diagnostic]:
    if isinstance(node, yaml.SequenceNode):
        for item in node.value:
            yield from _duplicates(source, item)
    if not isinstance(node, yaml.MappingNode):
        return
    seen: dict[str, yaml.Node] = {}
    for key, value in node.value:
        if isinstance(key, yaml.ScalarNode):
            if first := seen.get(key.value):
                message = f"key `{key.value}` stands twice; the first is on line {first.start_mark.line + 1}"
                yield source.finding("DTP105", key, message, "keep one of them")
            seen.setdefault(key.value, key)
        yield from _duplicates(source, value)
