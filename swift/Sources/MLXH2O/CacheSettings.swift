import MLX

/// What a layer's cache is to be: one value, checked when it is made and passed whole.
struct CacheSettings: Sendable {
    /// How much it may hold; `.heads` once the slots of each head are known.
    private(set) var size: H2OKVCache.Size
    let policy: any Policy
    /// Whether evicted tokens go on answering.
    let remainderAnswers: Bool
    /// Whether this library computes the attention.
    let attends: Bool
    /// How keys and values are stored.
    let packing: H2OPacking
    /// How many of the last steps can be taken back after evictions.
    let undo: Int
    /// In which packed keys are stored, and everything that is made of them.
    private(set) var frame: H2OFrame?
    /// Where each KV head's remainder saturates (``Remainder/saturation``), or one number for all.
    let saturation: [Float]
    /// Slots that follow as the conversation grows, where those of `size` are for a shorter one.
    private(set) var filling: [Stage] = []
    /// Positions that are never evicted, in order.
    private(set) var pins: [Range<Int>] = []

    /// - Throws: ``H2OError`` for settings out of range or a budget without room to evict.
    init(
        _ size: H2OKVCache.Size, policy: any Policy, remainder: Bool, attends: Bool,
        packing: H2OPacking, undo: Int, frame: H2OFrame? = nil,
        saturation: [Float] = [Remainder.saturation], filling: [Stage] = []
    ) throws {
        (self.size, self.policy, self.undo) = (size, policy, undo)
        (remainderAnswers, self.attends, self.packing) = (remainder, attends, packing)
        (self.frame, self.saturation) = (frame, saturation)
        try policy.validate()
        try Self.check(undo: undo, attends: attends)
        try check(frame)
        try checkSaturation()
        if !attends && policy.needsAttention {
            throw H2OError.policyNeedsAttention(
                policy: type(of: policy).name, model: "a stock model")
        }
        if !attends && packing.packs {
            throw H2OError.configuration(
                "A model that attends by itself cannot read packed keys and values.")
        }
        try checkSize()
        self.filling = try with(filling: filling).filling
    }

    /// Throw ``H2OError/configuration(_:)`` unless the size can serve: budgets are known now unless they
    /// depend on the model's widths.
    private func checkSize() throws {
        switch size {
        case .tokens(let count): try check(budgets: [count])
        case .heads(let budgets):
            guard !budgets.isEmpty else {
                throw H2OError.configuration("Give one number of slots per KV head.")
            }
            try check(budgets: budgets)
        case .bytes(let count): try policy.checkBytes(count)
        }
    }

    /// Throw ``H2OError/configuration(_:)`` unless so many steps can be taken back.
    static func check(undo: Int, attends: Bool) throws {
        try Limits.check("undo", undo, in: 0 ... Limits.mostSteps)
        if undo > 0 && !attends {
            throw H2OError.configuration(
                "undo needs a model that attends through this library, which takes a draft token by "
                    + "token: register it with H2OModels.register(), or leave undo at 0.")
        }
    }

    /// Throw ``H2OError/configuration(_:)`` unless remainders can saturate so.
    static func check(saturation: [Float]) throws {
        guard saturation.allSatisfy({ 0 ... Float(Limits.mostNumber) ~= $0 }) else {
            throw H2OError.configuration(
                "saturation is finite and at least 0 (0 is first order), one number for all KV heads "
                    + "or one for each; got \(saturation).")
        }
    }

    private func checkSaturation() throws {
        try Self.check(saturation: saturation)
        guard !saturation.isEmpty else {
            throw H2OError.configuration("Give one saturation for all KV heads, or one for each.")
        }
        guard attends || saturation.allSatisfy({ $0 == Remainder.saturation }) else {
            throw H2OError.configuration(
                "A model that attends by itself has the remainder as plain rows, which saturate of "
                    + "themselves: omit saturation.")
        }
    }

    /// Throw ``H2OError/configuration(_:)`` unless keys can be stored in the frame.
    private func check(_ frame: H2OFrame?) throws {
        guard frame != nil else { return }
        guard attends else {
            throw H2OError.configuration(
                "A frame needs a model that attends through this library, whose queries enter it too: "
                    + "register it with H2OModels.register(), or leave the frame out.")
        }
        guard packing.keyBits != nil else {
            throw H2OError.configuration(
                "A frame is for packed keys: set keyBits, or leave the frame out.")
        }
    }

    /// Throw ``H2OError/configuration(_:)`` unless a layer of such rows can have these settings.
    func check(_ rows: RowTypes) throws {
        try frame?.check(rows)
        guard saturation.count == 1 || saturation.count == rows.heads else {
            throw H2OError.configuration(
                "saturation has \(saturation.count) numbers for \(rows.heads) KV heads: give one for "
                    + "each, or one for all.")
        }
    }

    /// Throw ``H2OError/configuration(_:)`` unless the policy and the model can work with these
    /// budgets.
    func check(budgets: [Int]) throws {
        for budget in budgets { try policy.checkBudget(budget) }
        guard Set(budgets).count > 1 else { return }
        if !attends {
            throw H2OError.configuration(
                "A model that attends by itself needs one budget for all heads.")
        }
        if policy.options.unit == .layer {
            throw H2OError.configuration(
                "A policy whose unit is the layer needs one budget for all heads.")
        }
    }

    /// The same settings with the frame of what was saved, which its rows are in.
    ///
    /// - Throws: ``H2OError/configuration(_:)`` for a frame without packed keys.
    func with(frame: H2OFrame?) throws -> CacheSettings {
        var changed = self
        changed.frame = frame
        try changed.check(frame)
        return changed
    }

    /// Whether statistics of the evicted are kept at all.
    var remembers: Bool { remainderAnswers || type(of: policy).usesEvictedMean }

    /// Slots of each head for rows like these, those that follow, and how many more there are for plain
    /// rows of the remainder.
    func plan(for rows: RowTypes) throws -> (plan: SlotPlan, reserved: Int) {
        try check(rows)
        var widths = rows.widths(packing)
        widths.isFramed = frame != nil
        let (budgets, reserved) = try budgets(for: rows, of: widths)
        let plan = SlotPlan(budgets: budgets, later: filling)
        guard case .bytes(let bytes) = size,
            H2OConfiguration.startsNarrow(bytes: bytes, undo: undo, attends: attends)
        else { return (plan, reserved) }
        let few = SlotPlan(budgets: try self.budgets(for: rows, of: widths.narrow).budgets)
        return (few.whileNarrow(then: plan), reserved)
    }

    private func budgets(
        for rows: RowTypes, of widths: RowWidths
    ) throws -> (budgets: [Int], reserved: Int) {
        var budgets: [Int]
        switch size {
        case .heads(let given): budgets = given
        case .tokens(let count):
            budgets = Array(
                repeating: count - widths.remainderSlots(remembers), count: rows.heads)
        case .bytes(let bytes):
            let slots = try widths.slots(
                bytes: bytes, heads: rows.batch * rows.heads, policy: policy, remembers: remembers,
                undo: undo)
            budgets = Array(repeating: slots, count: rows.heads)
        }
        guard budgets.count == rows.heads else {
            throw H2OError.configuration(
                "\(budgets.count) budgets were given for \(rows.heads) KV heads.")
        }
        var reserved = 0
        if !attends && remainderAnswers {
            reserved = plainRows(forBudget: budgets.min()!)
            budgets = budgets.map { $0 - reserved }
        }
        try check(budgets: budgets)
        return (try PinnedPositions.room(for: pins, in: budgets, policy), reserved)
    }

    /// Tokens that every head protects, for the recent window; nil where none is asked for.
    ///
    /// - Throws: ``H2OError/configuration(_:)`` for budgets of which none are protected.
    func recentWindow(_ budgets: [Int]) throws -> Int? {
        guard packing.recent != nil else { return nil }
        let size = budgets.map { policy.recentSlots($0) }.min()!
        guard size >= 1 else {
            throw H2OError.configuration(
                "recentBits needs protected tokens: policy \"\(type(of: policy).name)\" protects "
                    + "none in a head of \(budgets.min()!) slots.")
        }
        return size
    }

    /// The fewest slots that memory pressure leaves to a head: those with which the policy can work,
    /// and the recent window where there is one, and some to choose from.
    var fewestSlots: Int {
        let pinned = pins.reduce(0) { $0 + $1.count }
        var least = policy.leastBudget(pinned: pinned)
        if packing.recent != nil {
            let range = least ... max(least, Limits.mostTokens)
            least = Limits.first(in: range) { policy.recentSlots($0) >= 1 } ?? least
        }
        return least + H2OConfiguration.fewestChoices
    }
}

// MARK: other slots and pins

extension CacheSettings {
    /// The same settings with another size, which was checked and stays.
    func with(size: H2OKVCache.Size) -> CacheSettings {
        var changed = self
        (changed.size, changed.filling) = (size, [])
        return changed
    }

    /// The same settings with another size, slots that follow, and pins.
    ///
    /// - Throws: ``H2OError`` where they cannot serve.
    func with(
        size: H2OKVCache.Size, filling: [Stage], pins: [Range<Int>]
    ) throws -> CacheSettings {
        let sized = with(size: size)
        try sized.checkSize()
        return try sized.with(filling: filling).with(pins: pins)
    }

    /// The same settings with other slots, which were checked.
    func with(_ plan: SlotPlan) -> CacheSettings {
        var changed = with(size: .heads(plan.budgets))
        changed.filling = plan.later
        return changed
    }

    /// The same settings with slots that follow as the conversation grows.
    ///
    /// - Throws: ``H2OError/configuration(_:)`` for stages that do not ascend, or such that the policy or
    ///   the model cannot work with.
    func with(filling: [Stage]) throws -> CacheSettings {
        guard let last = filling.last else { return self }
        guard case .heads(let first) = size, attends, undo == 0 else {
            throw H2OError.configuration(
                "filling needs the slots of each head, a model that attends through this library, and "
                    + "no undo: slots that have changed cannot be taken back.")
        }
        guard filling.count <= SlotPlan.mostStages, filling[0].beyond >= 1,
            last.beyond <= Limits.mostTokens,
            zip(filling, filling.dropFirst()).allSatisfy({ $0.beyond < $1.beyond }),
            filling.allSatisfy({ $0.budgets.count == first.count })
        else {
            throw H2OError.configuration(
                "filling is at most \(SlotPlan.mostStages) stages, ascending from 1 token, with slots for "
                    + "each of \(first.count) KV heads; got \(filling).")
        }
        for stage in filling {
            try check(budgets: stage.budgets)
            _ = try recentWindow(stage.budgets)
        }
        var changed = self
        changed.filling = filling
        return changed
    }

    /// The same settings with other pins, and with room for them in each head whose slots are known.
    ///
    /// - Throws: ``H2OError/configuration(_:)`` for too many pins.
    func with(pins: [Range<Int>]) throws -> CacheSettings {
        var changed = self
        changed.pins = try PinnedPositions.joined(pins)
        switch size {
        case .heads(let budgets): changed.size = .heads(try changed.withRoomForPins(budgets))
        case .tokens(let count): _ = try changed.withRoomForPins([count])
        case .bytes: break
        }
        changed.filling = try changed.fillingWithRoomForPins()
        return changed
    }

    /// The same settings with other pins, for which there is room in the slots that a layer has.
    ///
    /// - Throws: ``H2OError/configuration(_:)`` where those that follow have too little.
    func pinning(_ pins: [Range<Int>]) throws -> CacheSettings {
        var changed = self
        changed.pins = pins
        changed.filling = try changed.fillingWithRoomForPins()
        return changed
    }

    private func fillingWithRoomForPins() throws -> [Stage] {
        try filling.map {
            Stage(beyond: $0.beyond, budgets: try withRoomForPins($0.budgets))
        }
    }

    /// Slots of each head, the plain rows' among them, shared out so that pins have room.
    func withRoomForPins(_ budgets: [Int]) throws -> [Int] {
        let plain = attends || !remainderAnswers ? 0 : plainRows(forBudget: budgets.min()!)
        return try PinnedPositions.room(for: pins, in: budgets.map { $0 - plain }, policy).map {
            $0 + plain
        }
    }
}

extension CacheSettings {
    /// The frame, and the saturation of each of a layer's heads `[H]`, as arrays.
    func arrays(heads: Int) -> (frame: FrameArrays?, saturation: MLXArray) {
        let each =
            saturation.count == heads
            ? saturation : Array(repeating: saturation[0], count: heads)
        return (frame.map { FrameArrays($0) }, MLXArray(each))
    }
}
