"""`python -m pipeback ...` is `pipeback ...`."""

from pipeback.recipes.main import main

if __name__ == "__main__":
    main()
