"""`python -m evenkeel`: as the command `evenkeel`."""

from evenkeel.cli import main

if __name__ == "__main__":
    main()
