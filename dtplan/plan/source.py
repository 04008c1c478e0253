"""From the bytes of a plan file to YAML nodes with positions, refusing what could mislead a reader."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import yaml

from dtplan._errors import Diagnostic, PlanError
from dtplan.plan.spec import Place

# A built-in plan has 2 KiB and 5 levels; PyYAML composes about 200 KiB a second.
MAX_BYTES = 1 << 18
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

    def line(self, number: int) -> str:
        """The text of a line, counted from 0; empty after the last one."""
        return self._lines[number] if number < len(self._lines) else ""

    def _place(self, mark: yaml.Mark) -> Place:
        return Place(self.file, mark.line + 1, mark.column + 1, self.line(mark.line))


def finding_at(code: str, place: Place, message: str, hint: str = "") -> Diagnostic:
    """A diagnostic at ``place``."""
    return Diagnostic(
        code=code,
        message=message,
        hint=hint,
        file=place.file,
        line=place.line,
        column=place.column,
        source=place.source,
    )


def compose(path: Path, shown: str | None = None) -> tuple[Source, yaml.MappingNode]:
    """Read ``path`` into its root mapping.

    Raises:
        PlanError: the file cannot be read, is not UTF-8 text, is empty, is not one YAML mapping, holds an
            alias or a tag, or is larger than 256 KiB or nested deeper than 32 levels.
    """
    return compose_text(_text(path, shown or str(path)), shown or str(path))


def compose_text(text: str, file: str) -> tuple[Source, yaml.MappingNode]:
    """As ``compose``, for text that is already in memory."""
    if len(text) > MAX_BYTES:
        raise PlanError([_too_large(file)])
    text = text.removeprefix("\ufeff")
    source = Source(text, file)
    node = _root(source, text)
    if node is None:
        message, hint = "the plan is empty", "begin with `dtplan: 1`; `dtplan list` shows plans to start from"
        raise PlanError([Diagnostic(code="DTP103", file=file, message=message, hint=hint)])
    if not isinstance(node, yaml.MappingNode):
        message = "a plan is a mapping of keys to values"
        raise PlanError([source.finding("DTP202", node, message, "begin the file with `dtplan: 1`")])
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
        raise PlanError([_too_large(shown)])
    if b"\0" in data:
        message, hint = "the file is binary, a plan is YAML text", "give the path of a YAML file"
        raise PlanError([Diagnostic(code="DTP102", file=shown, message=message, hint=hint)])
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise PlanError([_not_utf8(data, error.start, shown)]) from None


def _not_utf8(data: bytes, at: int, file: str) -> Diagnostic:
    line, column = _position(data[:at].decode("utf-8-sig"))
    message = f"byte 0x{data[at]:02x} is not UTF-8"
    return finding_at("DTP102", Place(file, line, column), message, "save the file as UTF-8")


def _position(before: str) -> tuple[int, int]:
    """Line and column, from 1, of the character that follows ``before``."""
    lines = (before + "?").splitlines()
    return len(lines), len(lines[-1])


def _too_large(file: str) -> Diagnostic:
    message = f"the file is larger than {MAX_BYTES} bytes"
    hint = "a plan fits on a screen or two: is this the right file?"
    return Diagnostic(code="DTP107", file=file, message=message, hint=hint)


class _Refused(Exception):
    def __init__(self, code: str, mark: yaml.Mark, message: str, hint: str) -> None:
        super().__init__(message)
        self.code, self.mark, self.message, self.hint = code, mark, message, hint


class _Loader(yaml.SafeLoader):
    """Composes nodes and never constructs objects; aliases, anchors and tags are refused."""

    _depth = 0

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        event = self.peek_event()  # type: ignore[no-untyped-call]
        mark = event.start_mark
        if isinstance(event, yaml.AliasEvent):
            hint = f'write the value out; a path that begins with `*` is quoted: "*{event.anchor}"'
            raise _Refused("DTP106", mark, f"alias `*{event.anchor}`", hint)
        if getattr(event, "anchor", None) is not None:
            raise _Refused("DTP106", mark, f"anchor `&{event.anchor}`", "write the value out, or use `extends`")
        if (tag := getattr(event, "tag", None)) is not None:
            spelled = tag.replace("tag:yaml.org,2002:", "!!")
            raise _Refused("DTP106", mark, f"tag `{spelled}`", "remove it: a plan holds plain values only")
        self._depth += 1
        if self._depth > MAX_DEPTH:
            hint = "a plan has about 5: write a deep path as one key with dots, model.layers.*.mlp"
            raise _Refused("DTP107", mark, f"nested deeper than {MAX_DEPTH} levels", hint)
        node: yaml.Node | None = super().compose_node(parent, index)
        self._depth -= 1
        return node


def _root(source: Source, text: str) -> yaml.Node | None:
    try:
        loader = _Loader(text)
    except yaml.reader.ReaderError as error:
        raise PlanError([_unprintable(source, text, error.position)]) from None
    try:
        root: yaml.Node | None = loader.get_single_node()
    except _Refused as refused:
        raise PlanError([source.finding(refused.code, refused.mark, refused.message, refused.hint)]) from None
    except yaml.MarkedYAMLError as error:
        raise PlanError([_syntax_finding(source, error)]) from None
    except (ValueError, OverflowError):  # of int() and chr(), which PyYAML lets through: "\U99999999"
        message, hint = "not YAML: a number out of range", "remove the escape or the directive"
        raise PlanError([source.finding("DTP104", loader.get_mark(), message, hint)]) from None
    finally:
        loader.dispose()
    return root


def _unprintable(source: Source, text: str, at: int) -> Diagnostic:
    line, column = _position(text[:at])
    message = f"not YAML: the character U+{ord(text[at]):04X}"
    return finding_at("DTP104", Place(source.file, line, column), message, "remove it: a plan is plain text")


def _syntax_finding(source: Source, error: yaml.MarkedYAMLError) -> Diagnostic:
    mark, context = error.problem_mark or error.context_mark, error.context_mark
    assert mark is not None, "PyYAML marks every error of its scanner, parser and composer"
    problem = error.problem or "cannot be read"
    line = source.line(mark.line)
    indent = line[: len(line) - len(line.lstrip())]
    if "\\t" in problem or "\t" in indent:
        hint = "indent with spaces: YAML does not allow tabs"
    elif error.context == "while scanning an alias" and context is not None:
        mark, problem = context, "`*` at the start of a key reads as an alias"
        hint = f'quote the key: "{source.line(mark.line)[mark.column :].partition(":")[0]}"'
    elif "another document" in problem:
        problem, hint = "a second document", "one plan a file: remove the `---` in between"
    elif indent != line and line.lstrip().startswith("{"):
        hint = "quote a key that begins with `{`"
    elif context is not None and error.context is not None:
        what = error.context.removeprefix("while parsing ").removeprefix("while scanning ")
        begins = f"{context.line + 1}:{context.column + 1}"
        hint = f"{what} begins at {begins}: check brackets, colons and indentation"
    else:
        hint = "check the brackets, colons and indentation of this line"
    return source.finding("DTP104", mark, f"not YAML: {problem}", hint)


def duplicate_keys(source: Source, node: yaml.Node) -> Iterator[Diagnostic]:
    """A finding for every key that stands twice in one mapping, at any depth."""
    if isinstance(node, yaml.SequenceNode):
        for item in node.value:
            yield from duplicate_keys(source, item)
    if not isinstance(node, yaml.MappingNode):
        return
    seen: dict[str, yaml.Node] = {}
    for key, value in node.value:
        if isinstance(key, yaml.ScalarNode):
            if first := seen.get(key.value):
                message = f"key `{key.value}` stands twice; the first is on line {first.start_mark.line + 1}"
                yield source.finding("DTP105", key, message, "keep one of them")
            seen.setdefault(key.value, key)
        yield from duplicate_keys(source, value)
