/// Combinations in which every pair of two choices occurs, one choice of each of `sizes` parts: few of all.
///
/// - Parameter sizes: How many choices each part has.
/// - Returns: Combinations, each a choice from 0 on for every part.
func pairsCovered(_ sizes: [Int]) -> [[Int]] {
    struct Pair: Hashable {
        let parts: [Int], choices: [Int]
    }
    func pairs(_ combination: [Int]) -> Set<Pair> {
        var all: Set<Pair> = []
        for b in sizes.indices {
            for a in 0 ..< b {
                all.insert(Pair(parts: [a, b], choices: [combination[a], combination[b]]))
            }
        }
        return all
    }
    var missing: Set<Pair> = []
    for b in sizes.indices {
        for a in 0 ..< b {
            for i in 0 ..< sizes[a] {
                for j in 0 ..< sizes[b] {
                    missing.insert(Pair(parts: [a, b], choices: [i, j]))
                }
            }
        }
    }
    // One that is missing, and for the other parts in turn what covers most.
    var chosen: [[Int]] = []
    while let pair = missing.min(by: {
        ($0.parts + $0.choices).lexicographicallyPrecedes($1.parts + $1.choices)
    }) {
        var combination = sizes.map { chosen.count % $0 }
        for (part, choice) in zip(pair.parts, pair.choices) { combination[part] = choice }
        for part in sizes.indices where !pair.parts.contains(part) {
            combination[part] =
                (0 ..< sizes[part]).max { a, b in
                    func covered(_ choice: Int) -> Int {
                        var other = combination
                        other[part] = choice
                        return pairs(other).intersection(missing).count
                    }
                    return covered(a) < covered(b)
                } ?? 0
        }
        missing.subtract(pairs(combination))
        chosen.append(combination)
    }
    return chosen
}
