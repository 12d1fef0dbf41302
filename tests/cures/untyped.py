"""Messages with a cure in which no test of this folder is found, as the source has them; {} is what is filled in.

They are hardly more than what is filled in, and are typed all the same, word by word: by test_cures.py, and those of
ranks by test_cures_of_ranks.py.
"""

UNTYPED = frozenset(
    [
        "rank {} has {} {}, rank 0 has {}; start the same script with the same options on every rank",
        "rank {} has {} {}, rank {} has {}; start the same script with the same options and versions on every rank",
        "{} does not go with {}={}; use {}{}",
        "{} must be above 0{}, but is {}; for example {}",
        "{} must be one of {}, but is {}; for example {}({}={})",
    ]
)
