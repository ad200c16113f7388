"""Read a shell script without running it: its commands, with the variables and arrays that it sets itself."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from lean_finetune.core.errors import UserError, shortened
from lean_finetune.core.read_yaml import MOST_BYTES

# Words and operators.

_OPERATOR = re.compile(r"&>>?|\d?>>?(?:&[\d-])?|\d?<<?<?|&&|\|\||;;|[;&|()\n]")
_PLAIN = re.compile(r"(?:[^\\'\"`$ \t\n;&|()<>]|\$(?![({]))+")
_BRACKETS = {"$(": ("(", ")"), "${": ("{", "}")}


@dataclass(frozen=True)
class _Piece:
    """A part of a word, within one kind of quotation."""

    text: str
    quotes: str
    """`"`, `'` or nothing."""


@dataclass(frozen=True, kw_only=True)
class _Word:
    """A word before its variables are replaced."""

    line: int
    """Counted from 1."""
    pieces: Sequence[_Piece]

    @property
    def text(self) -> str:
        """As the script has it, without quotations."""
        return "".join(piece.text for piece in self.pieces)


@dataclass(frozen=True, kw_only=True)
class _Operator:
    """What ends a command, redirects it, or encloses the elements of an array."""

    text: str

    @property
    def redirects(self) -> bool:
        """Whether a command goes on behind it."""
        return ">" in self.text or "<" in self.text

    @property
    def names_file(self) -> bool:
        """Whether the next word belongs to it."""
        return self.redirects and self.text.lstrip("0123456789") != "<<" and not re.search(r"&[\d-]$", self.text)


_Token = _Word | _Operator


class _Lexer:
    """Splits a script into words and operators, without comments and the texts of `<<`."""

    def __init__(self, text: str, path: Path):
        self._text, self._path, self._place, self._line = text, path, 0, 1
        self._ends_of_texts: list[str] = []

    def tokens(self) -> Iterator[_Token]:
        while self._place < len(self._text):
            if self._text.startswith("\\\n", self._place):
                self._step(2)
            elif self._text[self._place] in " \t":
                self._step(1)
            elif self._text[self._place] == "#":
                self._step(self._until_end_of_line())
            elif match := _OPERATOR.match(self._text, self._place):
                self._step(len(match[0]))
                yield _Operator(text=match[0])
                self._skip_texts(match[0])
            else:
                yield self._word()

    def _skip_texts(self, operator: str) -> None:
        """Note the word that ends the text of a `<<`, or skip the texts that begin behind the end of this line."""
        if operator.lstrip("0123456789") == "<<":
            while self._text.startswith(("-", " ", "\t"), self._place):
                self._step(1)
            self._ends_of_texts.append(self._word().text)
        elif operator == "\n":
            for end in self._ends_of_texts:
                line = None
                while self._place < len(self._text) and line != end:
                    size = self._until_end_of_line()
                    line = self._text[self._place : self._place + size].strip()
                    self._step(size + 1)
            self._ends_of_texts = []

    def _word(self) -> _Word:
        line, pieces = self._line, []
        while self._place < len(self._text):
            here = self._text[self._place]
            if here == "\\":
                escaped = self._text[self._place + 1 : self._place + 2]
                pieces.append(_Piece(escaped if escaped != "\n" else "", "'"))
                self._step(2)
            elif here in "'\"":
                pieces.append(_Piece(self._quoted(here), here))
            elif here == "`" or self._text[self._place : self._place + 2] in _BRACKETS:
                pieces.append(_Piece(self._substitution(), ""))
            elif match := _PLAIN.match(self._text, self._place):
                pieces.append(_Piece(match[0], ""))
                self._step(len(match[0]))
            else:
                break
        return _Word(line=line, pieces=pieces)

    def _quoted(self, mark: str) -> str:
        """The content of a quotation that begins here."""
        start = end = self._place + 1
        while end < len(self._text) and self._text[end] != mark:
            end += 2 if mark == '"' and self._text[end] == "\\" else 1
        if end >= len(self._text):
            raise UserError(f"{self._path}:{self._line}: the quotation that begins here has no end; close it")
        self._step(end + 1 - self._place)
        return self._text[start:end]

    def _substitution(self) -> str:
        """`$(…)`, `${…}` or a text between backticks."""
        place, depth = self._place, 0
        opens, closes = _BRACKETS.get(self._text[place : place + 2], ("`", "`"))
        for end in range(place + 1, len(self._text)):
            depth += (self._text[end] == opens != closes) - (self._text[end] == closes)
            if self._text[end] == closes and depth <= 0:
                self._step(end + 1 - place)
                return self._text[place : end + 1]
        raise UserError(f"{self._path}:{self._line}: {shortened(self._text[place:][:20])} has no end; close it")

    def _until_end_of_line(self) -> int:
        found = self._text.find("\n", self._place)
        return (len(self._text) if found < 0 else found) - self._place

    def _step(self, count: int) -> None:
        self._line += self._text.count("\n", self._place, self._place + count)
        self._place += count


# Commands, with the values of variables.

_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\+?)=")
_EXPANSION = re.compile(r"\\([$`\"\\\n])|\$(?:\{([^{}]*)\}|([A-Za-z_]\w*|[@*#?$!\d-]))")
_BRACED = re.compile(r"([A-Za-z_]\w*|[@*#?$!\d])(?:\[[@*]\])?(?:(:?)([-=])([^$`]*))?")
_ARRAY = re.compile(r"\$\{([A-Za-z_]\w*)\[[@*]\]\}")
_CALCULATION = re.compile(r"\$\(\((.*)\)\)|\$\(\s*expr\s(.*)\)", re.DOTALL)
_PRODUCT = re.compile(r"\s*\d{1,9}(?:\s*[*/]\s*\d{1,9}){0,4}\s*")
_DECLARE = ("export", "declare", "local", "readonly", "typeset")
_OPEN, _CLOSE = ("if", "for", "while", "until", "case", "select", "{"), ("fi", "done", "esac", "}")
_KEYWORDS = (*_OPEN, *_CLOSE, "then", "else", "elif", "do", "!", "time")
_READ = ("read", "mapfile", "readarray")
"""Commands that set variables."""


class Unresolved(str):
    """A word with a part that only a shell can know. The text is the script's."""

    line: int | str
    why: str

    def __new__(cls, text: str, line: int | str, why: str) -> "Unresolved":
        """`line` counts from 1, or names a cell's; `why` names the part, and says why it is not known."""
        made = super().__new__(cls, text)
        made.line, made.why = line, why
        return made


_Value = list[str] | Unresolved
"""Of a variable: its text, or the elements of an array."""


@dataclass(frozen=True, kw_only=True)
class Command:
    """A simple command of a script."""

    variables: dict[str, str]
    """Those that the script exports, and those before the command's name."""
    words: Sequence[str]


def commands_of(text: str, path: Path) -> Iterator[Command]:
    """The simple commands of a script, in order. Variables have the values of the assignments above.

    A variable that is set in a condition, a loop or a function has no known value.

    Raises:
        UserError: a quotation does not end, or the script is larger than `MOST_BYTES` with its variables.
    """
    text = re.sub(r"\\[ \t]*\n", "\\\\\n", text.replace("\r\n", "\n"))
    return _Script(path=path, tokens=[*_Lexer(text, path).tokens()]).commands()


@dataclass(kw_only=True)
class _Script:
    """The variables of a script from its first command on."""

    path: Path
    tokens: Sequence[_Token]
    place: int = 0
    depth: int = 0
    """Conditions, loops and functions around this place."""
    subshells: int = 0
    """Brackets around it: their variables are gone behind them."""
    depends: bool = False
    """Whether the command before this one decides about it: `||`."""
    size: int = 0
    """Characters of all expanded words."""
    values: dict[str, _Value] = field(default_factory=dict)
    exported: set[str] = field(default_factory=set)

    def commands(self) -> Iterator[Command]:
        while self.place < len(self.tokens):
            words, own = self._simple_command()
            self._note(words)
            if words:
                exported = {name: self.values[name] for name in sorted(self.exported) if name in self.values}
                variables = {
                    name: value if isinstance(value, Unresolved) else " ".join(value)
                    for name, value in {**exported, **own}.items()
                }
                yield Command(variables=variables, words=[one for word in words for one in self._expanded(word)])
            else:
                self.values |= own

    def _next(self) -> _Token | None:
        return self.tokens[self.place] if self.place < len(self.tokens) else None

    def _simple_command(self) -> tuple[list[_Word], dict[str, _Value]]:
        """The words of the next command, and the variables before them."""
        words: list[_Word] = []
        own: dict[str, _Value] = {}
        while (token := self._next()) is not None:
            self.place += 1
            if isinstance(token, _Operator):
                if not token.redirects:
                    self.depends = token.text in ("&&", "||")
                    self.subshells = max(0, self.subshells + (token.text == "(") - (token.text == ")"))
                    break
                self.place += token.names_file and isinstance(self._next(), _Word)
                continue
            declares = bool(words) and words[0].text in _DECLARE
            match = _ASSIGNMENT.match(token.text) if not words or declares else None
            if match is not None and not token.pieces[0].quotes:
                value = self._assigned(token, match)
                (self.values if declares else own)[match[1]] = value
                self.exported |= {match[1]} if declares and words[0].text == "export" else set()
            elif not words and token.text in _KEYWORDS and not token.pieces[0].quotes:
                self._enter(token.text)
            else:
                words.append(token)
        return words, own

    def _enter(self, keyword: str) -> None:
        self.depth = max(0, self.depth + (keyword in _OPEN) - (keyword in _CLOSE))
        if keyword in ("for", "select") and isinstance(name := self._next(), _Word):
            self.values[name.text] = Unresolved(f"${name.text}", name.line, f"${name.text} is of a loop")

    def _note(self, words: Sequence[_Word]) -> None:
        """What a command does to variables by their names."""
        names = [word.text for word in words[1:] if word.text.isidentifier()]
        command = words[0].text if words else ""
        if command == "export":
            self.exported |= {*names}
        elif command == "unset":
            self.values = {name: value for name, value in self.values.items() if name not in names}
        elif command == "function":
            self.depth += words[-1].text == "{"
        elif command in _READ:
            for name in names:
                self.values[name] = Unresolved(f"${name}", words[0].line, f"${name} is read while the script runs")

    def _assigned(self, word: _Word, match: re.Match[str]) -> _Value:
        """The value of a variable behind its assignment, of which an array's elements are read here."""
        opens = self._next()
        is_array = word.text == match[0] and isinstance(opens, _Operator) and opens.text == "("
        if is_array:
            value: _Value = self._elements()
        else:
            start = _Piece(word.pieces[0].text[len(match[0]) :], "")
            text = self._one(_Word(line=word.line, pieces=[start, *word.pieces[1:]]))
            value = text if isinstance(text, Unresolved) else [text]
        if match[2] and not isinstance(value, Unresolved):
            before = self.values.get(match[1], [])
            if isinstance(before, Unresolved):
                return before
            value = [*before, *value] if is_array else self._counted(["".join((*before, *value))])
        if self.depth > 0 or self.subshells > 0 or self.depends:
            return Unresolved(word.text, word.line, f"${match[1]} is set under a condition in line {word.line}")
        return value

    def _elements(self) -> list[str]:
        found: list[str] = []
        self.place += 1
        while (token := self._next()) is not None:
            self.place += 1
            if isinstance(token, _Word):
                found += self._expanded(token)
            elif token.text == ")":
                break
        return found

    def _expanded(self, word: _Word) -> list[str]:
        """The words that a word becomes: none or several for an array, or for a variable without quotation."""
        if len(word.pieces) == 1 and (match := _ARRAY.fullmatch(word.text)) and word.pieces[0].quotes != "'":
            value = self.values.get(match[1], [])
            known = match[1] in self.values and not isinstance(value, Unresolved)
            why = value.why if isinstance(value, Unresolved) else f"{word.text} is not set in the script"
            return self._counted(list(value)) if known else [Unresolved(word.text, word.line, why)]
        text = self._one(word)
        is_split = not any(piece.quotes for piece in word.pieces) and "$" in word.text
        return [text] if isinstance(text, Unresolved) or not is_split else text.split()

    def _one(self, word: _Word) -> str:
        """The text of a word with the values of its variables."""
        parts = [piece.text if piece.quotes == "'" else self._piece(piece, word.line) for piece in word.pieces]
        unknown = next((part for part in parts if isinstance(part, Unresolved)), None)
        if unknown is not None:
            return Unresolved(word.text, word.line, unknown.why)
        return self._counted(["".join(parts)])[0]

    def _counted(self, texts: list[str]) -> list[str]:
        """The texts, whose size is added to the script's."""
        self.size += sum(map(len, texts)) + len(texts)
        if self.size > MOST_BYTES:
            raise UserError(f"{self.path}: must have at most {MOST_BYTES} bytes, with its variables; name another")
        return texts

    def _piece(self, piece: _Piece, line: int) -> str:
        """The text of a piece with the values of its variables."""
        if "`" in piece.text or "$(" in piece.text:
            return self._calculated(piece.text, line)
        found: list[str] = []
        place = 0
        for match in _EXPANSION.finditer(piece.text):
            if match[1] is None:
                value = self._variable(match, line)
            else:
                value = match[1].strip("\n") if piece.quotes else match[0]
            if isinstance(value, Unresolved):
                return value
            found += [piece.text[place : match.start()], value]
            place = match.end()
        rest = piece.text[place:]
        return (
            "".join([*found, rest]) if "${" not in rest else Unresolved(rest, line, f"{shortened(rest)} is no variable")
        )

    def _variable(self, match: re.Match[str], line: int) -> str:
        """The value of `$NAME`, `${NAME}`, or `${NAME:-default}`."""
        braced = None if match[2] is None else _BRACED.fullmatch(match[2])
        if match[2] is not None and braced is None:
            return Unresolved(match[0], line, f"{shortened(match[0])} is no plain variable")
        name = str(braced[1] if braced else match[3])
        value = self.values.get(name)
        if isinstance(value, Unresolved):
            return value
        text = None if value is None else " ".join(value)
        if braced and braced[3] and (text is None or (braced[2] and not text)):
            if braced[3] == "=" and not self.depth:
                self.values[name] = [braced[4]]
            return str(braced[4])
        if text is None:
            why = "not set in the script" if name.isidentifier() else "an argument of the script"
            return Unresolved(match[0], line, f"{match[0]} is {why}")
        return text

    def _calculated(self, text: str, line: int) -> str:
        """The result of `$(expr 16 / 4)` or `$((16 / 4))`: other commands are not run."""
        match = _CALCULATION.fullmatch(text)
        if match is None:
            return Unresolved(text, line, f"{shortened(text)} has the output of a command")
        inside = str(match[1] or match[2]).replace("\\*", "*")
        numbers = re.sub(r"(?<![\w$])(?=[A-Za-z_])", "$", inside) if match[1] else inside
        product = self._piece(_Piece(numbers, ""), line)
        if isinstance(product, Unresolved) or not _PRODUCT.fullmatch(product):
            why = product.why if isinstance(product, Unresolved) else f"{shortened(text)} is no product of numbers"
            return Unresolved(text, line, why)
        result = 1
        for sign, number in re.findall(r"([*/]?)\s*(\d+)", product):
            result = result // max(1, int(number)) if sign == "/" else result * int(number)
        return str(result)
