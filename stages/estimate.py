"""Predict the peak memory of training before training: `python -m stages.estimate`."""

from lean_finetune.stages.estimate import main

if __name__ == "__main__":
    main()
