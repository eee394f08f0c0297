"""Algorithm 1 of the DeepReduce paper's appendix as it stands there: policy p2, one item of each conflict set in turn."""


def algorithm_1(positives, r, rng):
    """positives: [(position, its bits)] -> r of them, as a set. rng: a random.Random."""
    conflict_sets = {}
    for i, bits in positives:
        for bit in bits:
            conflict_sets.setdefault(bit, set()).add(i)
    ordered = sorted((sorted(items) for items in conflict_sets.values()), key=len)
    chosen = set()
    while len(chosen) < r:
        remaining = []
        for items in ordered:
            if len(chosen) == r:
                break
            if len(items) == 1:
                chosen.add(items[0])
                continue
            items = [i for i in items if i not in chosen]
            if items:
                chosen.add(rng.choice(items))
                remaining.append(items)
        ordered = remaining
    return chosen
