"""A reward that any sampled text moves, so that every batch has a gradient whatever the model can do."""


def vowels(completion: str) -> dict[str, float]:
    """Share of vowels among the first characters, and a little for an answer that ends."""
    letters = completion[:32]
    return {"vowels": sum(c in "aeiou" for c in letters) / 32, "ended": 0.1 * (len(completion) < 32)}


def even_vowels(completion: str) -> float:
    """Right or wrong, as a coin: of groups of four answers one in eight is all alike, and dynamic sampling replaces it."""
    return float(sum(c in "aeiou" for c in completion) % 2 == 0)


def raises(completion: str) -> float:
    """For the test of a reward that can't work."""
    return 1 / 0
