"""Stage tokenize: turns the pinned rows into tokens."""

from lean_finetune.stages.tokenize import main

if __name__ == "__main__":
    main()
