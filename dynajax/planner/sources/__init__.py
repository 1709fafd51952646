"""Who sends each piece: the nearest holder, the least busy of equals; of partial sources, where sums are made."""
