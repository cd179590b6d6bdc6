import MLX

/// What a layer's cache is to be, as a value; what makes no cache the engine refuses.
struct CacheSettings: Sendable {
    /// How much it may hold.
    var size: H2OKVCache.Size
    let policy: any H2OPolicy
    /// Whether evicted tokens go on answering.
    let remainderAnswers: Bool
    /// Whether this library computes the attention.
    let attends: Bool
    /// How keys and values are stored.
    let packing: H2OPacking
    /// How many of the last steps can be taken back after evictions.
    let undo: Int
    /// In which packed keys are stored, and everything that is made of them.
    var frame: H2OFrame?
    /// Where each KV head's remainder saturates (``H2ORemainder/saturation``), or one number for all.
    let saturation: [Float]
    /// The keys' RoPE, where queries see them without gaps.
    var rope: H2ORope?
    /// Slots that follow as the conversation grows, where those of `size` are for a shorter one.
    var filling: [Stage] = []
    /// Positions that are never evicted.
    var pins: [Range<Int>] = []

    init(
        _ size: H2OKVCache.Size, policy: any H2OPolicy, remainder: Bool, attends: Bool,
        packing: H2OPacking, undo: Int, frame: H2OFrame? = nil,
        saturation: [Float] = [H2ORemainder.saturation], rope: H2ORope? = nil,
        filling: [Stage] = [],
        pins: [Range<Int>] = []
    ) {
        (self.size, self.policy, self.undo) = (size, policy, undo)
        (remainderAnswers, self.attends, self.packing) = (remainder, attends, packing)
        (self.frame, self.saturation) = (frame, saturation)
        (self.rope, self.filling, self.pins) = (rope, filling, pins)
    }

    /// Whether statistics of the evicted are kept at all.
    var remembers: Bool { remainderAnswers || policy.usesEvictedMean }

    /// A cache of the engine, where slots of each head are known.
    ///
    /// - Throws: ``H2OError`` for what makes no cache.
    func engine() throws -> Engine? {
        try policy.validate()
        if !attends && policy.needsAttention {
            throw H2OError.policyNeedsAttention(policy: policy.name, model: "a stock model")
        }
        // What the model's widths will tell is left to them; the rest is tried with a head or two.
        let heads = frame?.heads ?? max(saturation.count, 1)
        func tried(_ slots: Int) throws -> Engine? {
            _ = try Engine(self, SlotPlan(budgets: Array(repeating: slots, count: heads)))
            return nil
        }
        switch size {
        case .heads(let slots): return try Engine(self, SlotPlan(budgets: slots, later: filling))
        case .tokens(let count): return try tried(count)
        case .bytes(let count):
            try policy.checkBytes(count)
            return try tried(Limits.mostTokens)
        }
    }

    /// A cache of the engine for rows like these.
    ///
    /// - Throws: ``H2OError/configuration(_:)`` for a size that leaves too few slots.
    func engine(for rows: RowTypes) throws -> Engine {
        if let frame, frame.width != rows.keyWidth {
            throw H2OError.configuration(
                "A frame of KV heads of \(frame.width) cannot serve keys of \(rows.keyWidth): it is "
                    + "another layer's or another model's.")
        }
        return try Engine(self, plan(for: rows))
    }

    /// Slots of each head for rows like these, and those that follow.
    private func plan(for rows: RowTypes) throws -> SlotPlan {
        var widths = rows.widths(packing)
        widths.isFramed = frame != nil
        let plan = SlotPlan(budgets: try budgets(for: rows, of: widths), later: filling)
        guard case .bytes(let bytes) = size,
            H2OConfiguration.startsNarrow(bytes: bytes, undo: undo, attends: attends)
        else { return plan }
        let few = SlotPlan(budgets: try budgets(for: rows, of: widths.narrow))
        return few.whileNarrow(then: plan)
    }

    private func budgets(for rows: RowTypes, of widths: RowWidths) throws -> [Int] {
        switch size {
        case .heads(let given): return given
        case .tokens(let count):
            return Array(repeating: count - widths.remainderSlots(remembers), count: rows.heads)
        case .bytes(let bytes):
            let slots = try widths.slots(
                bytes: bytes, heads: rows.batch * rows.heads, policy: policy, remembers: remembers,
                undo: undo)
            return Array(repeating: slots, count: rows.heads)
        }
    }

    /// How many of a head's slots the evicted take as plain rows.
    func plainRows(of slots: Int) -> Int {
        attends || !remainderAnswers ? 0 : MLXH2O.plainRows(forBudget: slots)
    }

    /// The fewest slots that memory pressure leaves to a head: those with which the policy can work,
    /// beside so many pinned tokens, plain rows and the recent window where there is one, and some to
    /// choose from.
    func fewestSlots(pinned: Int) -> Int {
        let least = policy.leastBudget(pinned: pinned)
        let range = least ... max(least, Limits.mostTokens)
        let enough = Limits.first(in: range) {
            $0 - plainRows(of: $0) >= least
                && (packing.recentBits == nil || policy.recentSlots($0) >= 1)
        }
        return (enough ?? least) + H2OConfiguration.fewestChoices
    }
}

/// How many plain rows a head of `budget` slots can afford: 8 of 128 pays, 8 of 64 does not.
func plainRows(forBudget budget: Int) -> Int {
    max(1, min(8, budget / 16 / 2 * 2))
}
