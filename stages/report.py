"""Write the report of a run: `python -m stages.report`."""

from lean_finetune.stages.report import main

if __name__ == "__main__":
    main()
