"""Entry point of `python -m normlab`, which torchrun uses."""

from normlab.cli.main import main

if __name__ == "__main__":
    main()
