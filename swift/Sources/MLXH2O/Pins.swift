/// What became of the positions that were to be pinned.
public struct H2OPinAnswer: Sendable, Equatable {
    /// Gone from some heads; pinned in the others.
    public internal(set) var partly: [Range<Int>] = []
    /// Evicted from every head: nothing can be pinned there.
    public internal(set) var gone: [Range<Int>] = []

    /// Whether every head has every one.
    public var isComplete: Bool { partly.isEmpty && gone.isEmpty }
}

extension H2OKVCache {
    /// Spans of positions whose tokens are never evicted.
    public var pins: [Range<Int>] { settings.pins }

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
    public func pin(_ spans: [Range<Int>]) throws -> H2OPinAnswer {
        guard !spans.isEmpty else { return H2OPinAnswer() }
        var answer = H2OPinAnswer()
        try changing {
            try $0.pin(spans)
            let missing = $0.missing, pinned = $0.pins
            // What no head holds is not pinned.
            for position in missing.joined() {
                let span = position ..< position + 1
                if pinned.contains(where: { $0.contains(position) }) {
                    answer.partly.append(joining: span)
                } else {
                    answer.gone.append(joining: span)
                }
            }
            if !answer.isComplete {
                let loss =
                    "Evicted before they were pinned: \(answer.gone) from every head, "
                    + "\(answer.partly) from some."
                notices.append(H2ONotice(subject: .pins, message: loss).log())
            }
        }
        return answer
    }

    /// Let all pinned tokens go as any others.
    public func unpin() throws {
        try changing {
            try $0.unpin()
        }
    }

    /// Say at the beginning of a turn how much of what was attended to before still counts.
    ///
    /// - Parameter carry: From 0 (all that is held is as if it came just now) to 1 (all of it counts, as
    ///   without this call): scores speak of that part of the steps that they spoke of.
    /// - Throws: ``H2OError/configuration(_:)`` for another number.
    public func newTurn(carry: Double) throws {
        guard 0 ... 1 ~= carry else {
            throw H2OError.configuration("carry is a number from 0 to 1; got \(carry).")
        }
        try changing {
            try $0.newTurn(carry: carry)
        }
    }
}

extension [Range<Int>] {
    /// Add a span that is not below the last, which it may go on.
    fileprivate mutating func append(joining span: Range<Int>) {
        if let last, last.upperBound == span.lowerBound {
            self[count - 1] = last.lowerBound ..< span.upperBound
        } else {
            append(span)
        }
    }
}
