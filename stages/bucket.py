"""Divide the training rows into optimizer steps and micro-batches: `python -m stages.bucket`."""

from lean_finetune.stages.bucket import main

if __name__ == "__main__":
    main()
