"""Pin the code of every stage: `python -m stages.code`."""

from lean_finetune.stages.code import main

if __name__ == "__main__":
    main()
