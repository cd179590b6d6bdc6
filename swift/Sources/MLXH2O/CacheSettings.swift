import MLX

/// What a layer's cache is to be, as a value; what makes no cache the engine refuses.
struct CacheSettings: Sendable {
    /// Slots of each KV head.
    var budgets: [Int]
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
    /// Slots that follow as the conversation grows, where `budgets` are those of a shorter one.
    var filling: [Stage] = []
    /// Positions that are never evicted.
    var pins: [Range<Int>] = []

    init(
        _ budgets: [Int], policy: any H2OPolicy, remainder: Bool, attends: Bool,
        packing: H2OPacking, undo: Int, frame: H2OFrame? = nil,
        saturation: [Float] = [H2ORemainder.saturation], rope: H2ORope? = nil,
        filling: [Stage] = [],
        pins: [Range<Int>] = []
    ) {
        (self.budgets, self.policy, self.undo) = (budgets, policy, undo)
        (remainderAnswers, self.attends, self.packing) = (remainder, attends, packing)
        (self.frame, self.saturation) = (frame, saturation)
        (self.rope, self.filling, self.pins) = (rope, filling, pins)
    }

    /// Whether statistics of the evicted are kept at all.
    var remembers: Bool { remainderAnswers || policy.usesEvictedMean }

    /// A cache of the engine.
    ///
    /// - Throws: ``H2OError`` for what makes no cache.
    func engine() throws -> Engine {
        try policy.validate()
        if !attends && policy.needsAttention {
            throw H2OError.policyNeedsAttention(policy: policy.name, model: "a stock model")
        }
        return try Engine(self, SlotPlan(budgets: budgets, later: filling))
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
