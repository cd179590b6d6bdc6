import MLX

/// A layer before one step: what the step changed, as it was, to be put back bit for bit.
///
/// A step is one token. Slots are counted in their heads, and scores are read by the runs as they
/// were, so that a store may grow in between.
struct StepBefore {
    let offset: Int
    let runs: [Run]
    /// Those named before.
    let victims: MLXArray?
    /// Of all slots, `[B, S]` as `runs` lay them out; nil where the policy accumulates none.
    let scores: MLXArray?
    /// Of the newest tokens, where they are stored apart.
    let window: RecentWindow.Before?
    /// Before a row was folded into it.
    var remainder: Remainder?
    /// Rows `[B, H, ...]` by name that were overwritten, and their slots `[B, H]`.
    var overwritten: (places: MLXArray, rows: Fields)?

    /// Whether any head had lost a token.
    var hasEvicted: Bool { hasEvictedAny(offset, runs, window?.length ?? 0) }

    var arrays: [MLXArray] {
        var arrays = [victims, scores].compactMap { $0 } + (remainder?.arrays ?? [])
        if let overwritten {
            arrays.append(overwritten.places)
            arrays += overwritten.rows.values
        }
        return arrays + (window?.arrays ?? [])
    }
}

/// The last steps of a layer, to be taken back.
struct Journal {
    /// A prompt chunk just attended to, and the layer before it: a shorter chunk can stand in its
    /// place, until the next token comes.
    struct Chunk {
        let before: Layer
        let tokens: NewTokens

        var arrays: [MLXArray] {
            before.namedArrays.map(\.array) + [tokens.queries, tokens.keys, tokens.values]
        }
    }

    /// How many steps are remembered.
    let limit: Int
    /// Oldest first.
    private(set) var steps: [StepBefore] = []
    private(set) var chunk: Chunk?

    init(limit: Int) { self.limit = limit }

    /// Everything held beside the layer's own arrays.
    var arrays: [MLXArray] { steps.flatMap(\.arrays) + (chunk?.arrays ?? []) }

    mutating func append(_ step: StepBefore) {
        chunk = nil
        steps.append(step)
        if steps.count > limit { steps.removeFirst() }
    }

    /// Remember a chunk, and no step before it.
    mutating func begin(_ chunk: Chunk) { (steps, self.chunk) = ([], chunk) }

    /// The last n steps or all, newest first, which are remembered no longer; nor is a chunk.
    mutating func removeLast(_ n: Int) -> [StepBefore] {
        let last = steps.suffix(n)
        steps.removeLast(last.count)
        chunk = nil
        return last.reversed()
    }

    mutating func removeAll() { (steps, chunk) = ([], nil) }

    /// How many of the newest tokens of a layer can be taken back.
    ///
    /// All steps that are remembered, evictions or not; before the first eviction any older token as
    /// well, whose attention then stays in the scores of others.
    func undoable(of layer: Layer) -> Int {
        if let chunk, layer.hasEvicted { return min(limit, chunk.tokens.count - 1) }
        let hadEvicted = steps.first?.hasEvicted ?? layer.hasEvicted
        return hadEvicted ? steps.count : layer.offset
    }
}

extension Layer {
    /// Whether any head has lost a token.
    var hasEvicted: Bool { hasEvictedAny(offset, store.runs, recentlyHeld) }
}

private func hasEvictedAny(_ offset: Int, _ runs: [Run], _ recent: Int) -> Bool {
    runs.contains { offset - recent > $0.length }
}
