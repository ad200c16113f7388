"""Pin the data or the model of a run: `python -m stages.pin data` or `python -m stages.pin model`."""

from lean_finetune.stages.pin import main

if __name__ == "__main__":
    main()
