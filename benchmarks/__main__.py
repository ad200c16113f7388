"""List the benchmarks, with what each is about: `python -m benchmarks`."""

import ast
from collections.abc import Iterator
from pathlib import Path

HERE = Path(__file__).parent


def commands() -> Iterator[tuple[str, str]]:
    """(name, first line of its docstring) of each module that `python -m` runs, in order of names; imports none."""
    modules = {path.stem: path for path in HERE.glob("*.py") if path != Path(__file__)}
    packages = {path.parent.name: path for path in HERE.glob("*/__main__.py")}
    for name, path in sorted((modules | packages).items()):
        text = path.read_text(encoding="utf-8")
        if 'if __name__ == "__main__":' in text:
            yield name, (ast.get_docstring(ast.parse(text)) or "").partition("\n")[0]


def main() -> None:
    """Print the list."""
    found = list(commands())
    width = max(len(name) for name, _ in found)
    for name, about in found:
        print(f"{name:<{width}}  {about}")
    print("\nRun one: python -m benchmarks.NAME")


if __name__ == "__main__":
    main()
