"""Import what every case needs, wait for a line on stdin, then run a module as `python -m MODULE ARGUMENTS` does.

Imports take longer than the steps of a case. So the processes of cases that are timed import together before the first
of them is measured, and that of a memory case while the GPU measures the case before it. It prints a line when it has
imported, and does not touch the GPU until then: bitsandbytes, which asks for GPUs when it is imported, and peft, which
imports it, are left to the module.
"""

import runpy
import sys
from importlib import import_module

AHEAD = (
    "torch._inductor.compile_fx",
    "transformers.models.auto.auto_factory",
    "transformers.models.llama.modeling_llama",
    "datasets",
)
"""Modules that import most of what a case does, but not bitsandbytes."""


def main() -> None:
    """Wait, unless stdin ends without a line: then the session is over."""
    for name in AHEAD:
        try:
            import_module(name)
        except ModuleNotFoundError:  # A machine without TRL needs no datasets; the module says what it misses.
            continue
    print("ready", flush=True)
    if sys.stdin.readline():
        module, *sys.argv[1:] = sys.argv[1:]
        runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
