"""Fine-tune the pinned model: `python -m stages.train`."""

from lean_finetune.stages.train import main

if __name__ == "__main__":
    main()
