"""Pack documents into rows as the tests need them."""

import numpy as np


def pack(documents, rows, seq):
    """Tokens, segment_ids and positions, each (rows, seq), of a list of documents for each row."""
    tokens, segments, positions = (np.zeros((rows, seq), np.int32) for _ in range(3))
    for row, in_row in enumerate(documents):
        start = 0
        for number, document in enumerate(in_row, start=1):
            place = slice(start, start + len(document))
            tokens[row, place], segments[row, place], positions[row, place] = document, number, range(len(document))
            start += len(document)
    return tokens, segments, positions
