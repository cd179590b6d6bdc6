/// The largest values of what is checked before the engine has it, as in Python's checks.py.
enum Limits {
    /// Tokens, slots and positions, which are int32; conversations go on.
    static let mostTokens = 1 << 30
    /// Tokens whose positions are kept in 2 bytes each, in 4 from then on.
    static let fewPositions = 1 << 15
    /// A pebibyte, above any memory; products with a model's widths stay within 64 bits.
    static let mostBytes = 1 << 50
    /// Of a size as a share of a 16-bit cache.
    static let largestShare = 16.0

    /// Throw ``H2OError/configuration(_:)`` unless a number is in its range.
    static func check<Number: Comparable>(
        _ name: String, _ value: Number, in range: ClosedRange<Number>
    ) throws {
        guard range ~= value else {
            throw H2OError.configuration(
                "\(name) is from \(range.lowerBound) to \(range.upperBound); got \(value).")
        }
    }

    /// The first number of a range from which on a condition holds; nil where it never does.
    ///
    /// - Parameters:
    ///   - range: To be searched.
    ///   - holds: A condition that, once it holds, holds for all larger numbers.
    static func first(in range: ClosedRange<Int>, where holds: (Int) -> Bool) -> Int? {
        guard holds(range.upperBound) else { return nil }
        var (few, enough) = (range.lowerBound - 1, range.upperBound)
        while enough - few > 1 {
            let middle = few + (enough - few) / 2
            if holds(middle) { enough = middle } else { few = middle }
        }
        return enough
    }
}
