"""`python -m normlab`, which is how torchrun starts it."""

from normlab.cli.main import main

if __name__ == "__main__":
    main()
