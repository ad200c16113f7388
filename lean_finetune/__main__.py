"""The command `lean-finetune`: `python -m lean_finetune`."""

from lean_finetune.cli import main

if __name__ == "__main__":
    main(prog_name="lean-finetune")
