"""Log-probabilities under the model before training: `python -m stages.reference`."""

from lean_finetune.stages.reference import main

if __name__ == "__main__":
    main()
