import MLX

/// Positions whose tokens no policy evicts.
///
/// A slot's position p is stored as -1 - p while its token is pinned: below every sink, so whatever
/// spares sinks spares pinned tokens too, on the GPU as here, and steps cost the same with pins as
/// without.
enum PinnedPositions {
    /// The same positions in as few spans as can be, in order.
    ///
    /// - Throws: ``H2OError/configuration(_:)`` for spans that are empty or out of range.
    static func joined(_ spans: [Range<Int>]) throws -> [Range<Int>] {
        guard
            spans.allSatisfy({
                !$0.isEmpty && $0.lowerBound >= 0 && $0.upperBound <= Limits.mostTokens
            })
        else {
            throw H2OError.configuration(
                "pins are spans of positions from 0 on, none of them empty; got \(spans).")
        }
        return spans.sorted { ($0.lowerBound, $0.upperBound) < ($1.lowerBound, $1.upperBound) }
            .reduce(into: []) { joined, span in
                guard let last = joined.last, span.lowerBound <= last.upperBound else {
                    joined.append(span)
                    return
                }
                joined[joined.count - 1] =
                    last.lowerBound ..< max(last.upperBound, span.upperBound)
            }
    }

    /// Positions as slots store them.
    static func stored(_ positions: MLXArray, _ spans: [Range<Int>]) -> MLXArray {
        spans.reduce(unmarked(positions)) { stored, span in
            let inside =
                (stored .>= Int32(span.lowerBound)) .&& (stored .< Int32(span.upperBound))
            return which(inside, -1 - stored, stored)
        }
    }

    /// Positions without the marks of pins.
    static func unmarked(_ stored: MLXArray) -> MLXArray { maximum(stored, -1 - stored) }

    /// A layer's budgets, shared out so that every head holds its pins and can still evict.
    ///
    /// A head that is too small gets what it lacks from the others, of each in proportion to what it
    /// can spare. As many slots as before are shared out.
    ///
    /// - Throws: ``H2OError/configuration(_:)`` where all together have too few.
    static func room(
        for spans: [Range<Int>], in budgets: [Int], _ policy: any Policy
    ) throws -> [Int] {
        let pinned = spans.reduce(0) {
            $0 + max($1.upperBound - max($1.lowerBound, policy.options.sink), 0)
        }
        guard pinned > 0 else { return budgets }
        let least = policy.leastBudget(pinned: pinned)
        let lacking = budgets.reduce(0) { $0 + max(least - $1, 0) }
        if lacking == 0 { return budgets }
        let spares = budgets.map { max($0 - least, 0) }, spare = spares.reduce(0, +)
        guard spare >= lacking else {
            let mean = budgets.reduce(0, +) / budgets.count
            let most = (0 ..< pinned).last { policy.leastBudget(pinned: $0) <= mean } ?? 0
            throw H2OError.configuration(
                "\(pinned) pinned tokens are too many: with \(policy.options.sink) sinks, "
                    + "\(policy.recentSlots(least)) recent tokens and \(policy.options.evictEvery) to "
                    + "evict they need \(least) slots in every KV head, and a layer here has \(mean) "
                    + "a head. Pin at most \(most) tokens, or give a larger budget.")
        }
        var given = spares.map { $0 * lacking / spare }
        // What rounding down left over comes of the largest.
        let largest = spares.indices.sorted { (-spares[$0], $0) < (-spares[$1], $1) }
        for i in largest.prefix(lacking - given.reduce(0, +)) { given[i] += 1 }
        return zip(budgets, given).map { max($0, least) - $1 }
    }
}

/// What became of the positions that were to be pinned.
public struct PinAnswer: Sendable, Equatable {
    /// Gone from some heads; pinned in the others.
    public internal(set) var partly: [Range<Int>] = []
    /// Evicted from every head: nothing can be pinned there.
    public internal(set) var gone: [Range<Int>] = []

    /// Whether every head has every one.
    public var isComplete: Bool { partly.isEmpty && gone.isEmpty }
}

extension H2OKVCache {
    /// Spans of positions whose tokens are never evicted.
    public var pins: [Range<Int>] { core.settings.pins }

    /// Never evict the tokens at some positions, whatever the policy.
    ///
    /// Tokens that are still to come can be pinned, and those that are held. Pins count against the
    /// budget; a head that is too small for them gets slots of the layer's larger heads. They stay with
    /// their positions through resizing, trimming, copies and files. Steps before this cannot be taken
    /// back any more.
    ///
    /// - Parameter spans: Positions.
    /// - Returns: Which were gone already.
    /// - Throws: ``H2OError/configuration(_:)`` for too many; nothing is changed.
    @discardableResult
    public func pin(_ spans: [Range<Int>]) throws -> PinAnswer { try core.pin(spans) }

    /// Let all pinned tokens go as any others.
    public func unpin() throws { try core.unpin() }

    /// Say at the beginning of a turn how much of what was attended to before still counts.
    ///
    /// - Parameter carry: From 0 (all that is held is as if it came just now) to 1 (all of it counts, as
    ///   without this call): scores speak of that part of the steps that they spoke of.
    /// - Throws: ``H2OError/configuration(_:)`` for another number.
    public func newTurn(carry: Double) throws { try core.newTurn(carry: carry) }
}

extension Core {
    /// As of ``H2OKVCache/pin(_:)``.
    mutating func pin(_ spans: [Range<Int>]) throws -> PinAnswer {
        let asked = try PinnedPositions.joined(spans)
        guard let layer = layerAtRest() else {
            try hold(pins: PinnedPositions.joined(settings.pins + asked))
            return PinAnswer()
        }
        let answer = try layer.answer(for: asked)
        let gone = Set(answer.gone.flatMap { Array($0) })
        let kept = try PinnedPositions.joined(
            asked.flatMap { $0.filter { !gone.contains($0) }.map { $0 ..< $0 + 1 } })
        try hold(pins: PinnedPositions.joined(settings.pins + kept))
        return answer
    }

    /// As of ``H2OKVCache/unpin()``.
    mutating func unpin() throws {
        _ = layerAtRest()
        try hold(pins: [])
    }
}

extension Layer {
    /// What becomes of positions, by what the heads hold.
    func answer(for asked: [Range<Int>]) throws -> PinAnswer {
        let heads = held.flatMap { $0.map { Set($0.map { Int($0.position) }) } }
        var answer = PinAnswer()
        for position in asked.flatMap({ Array($0.clamped(to: 0 ..< offset)) }) {
            let holding = heads.filter { $0.contains(position) }.count
            if holding == 0 { answer.gone.append(position ..< position + 1) }
            if 1 ..< heads.count ~= holding { answer.partly.append(position ..< position + 1) }
        }
        answer.gone = try PinnedPositions.joined(answer.gone)
        answer.partly = try PinnedPositions.joined(answer.partly)
        return answer
    }
}
