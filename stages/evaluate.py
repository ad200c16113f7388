"""Compare the base and the tuned model on held-out rows: `python -m stages.evaluate`."""

from lean_finetune.stages.evaluate import main

if __name__ == "__main__":
    main()
