import Foundation
import MLX
import MLXLMCommon

/// A KV cache that holds a fixed number of tokens and chooses which.
///
/// While decoding, the new row overwrites the slot of the token that the policy chose to forget, and
/// that token's row is folded into the remainder. A prompt chunk is attended together with the kept
/// slots and then reduced to the budget with one gather.
///
/// A cache that attends (``attends``) is asked by ``h2oAttention(queries:keys:values:cache:scale:mask:sinks:)``
/// and runs every policy, head budgets and the exact remainder. One that does not goes into any
/// stock model: it looks at keys only, and the remainder goes in as plain rows.
///
/// Save it with ``saveCaches(_:to:metadata:)``; `savePromptCache` and `ChatSession.saveCache` cannot
/// write it.
public final class H2OKVCache: AttendingKVCache, H2OScoreTracking {
    /// How much a cache may hold.
    public enum Size: Sendable, Equatable {
        /// Slots per KV head; the remainder is charged against them.
        case tokens(Int)
        /// Bytes of this layer's cache, everything counted.
        case bytes(Int)
        /// The slots of each KV head; the remainder is not charged.
        case heads([Int])
    }

    /// What chooses.
    public let policy: any Policy
    /// Whether evicted tokens go on answering.
    public let remainderAnswers: Bool
    /// Whether this library computes the attention.
    public let attends: Bool
    /// How keys and values are stored.
    public let packing: Packing
    /// As given; `resize` makes it `.heads`.
    public internal(set) var size: Size
    /// The next logical position.
    public internal(set) var offset = 0

    // Where the rows lie, what stays of the evicted, and which slots go next. While kernels decode,
    // only how many rows there are is known here, and `decoding` has all else.
    var heldStore: SlotStore?
    var heldRemainder: Remainder?
    var heldVictims: MLXArray?
    var decoding: GPUDecoding?
    /// How often in a row the arrays were taken back after a single step.
    var briefDecodings = 0
    /// The newest tokens, where they are stored in another width; all others are in the store.
    var recent: RecentZone?
    /// Rows of a chunk that goes over budget, while it is attended to.
    var pending: Fields?
    /// Batch, heads, widths and dtypes that rows must have.
    var rowTypes: RowTypes?
    /// Whether the model has attended through ``attend(queries:keys:values:scale:mask:sinks:)``.
    var attended = false
    /// Arrays set by `state` whose names `metaState` has not told yet.
    var unnamed: [MLXArray]?
    let pressure: MemoryPressure?
    var pressureShare = 1.0
    var fullBudgets: [Int]?

    struct RowTypes: Equatable {
        let batch, heads, keyWidth, valueWidth: Int
        let keyDType, valueDType: DType

        init(keys: MLXArray, values: MLXArray) {
            (batch, heads) = (keys.dim(0), keys.dim(1))
            (keyWidth, valueWidth) = (keys.dim(3), values.dim(3))
            (keyDType, valueDType) = (keys.dtype, values.dtype)
        }

        init(
            batch: Int, heads: Int, keyWidth: Int, valueWidth: Int, keyDType: DType,
            valueDType: DType
        ) {
            (self.batch, self.heads) = (batch, heads)
            (self.keyWidth, self.valueWidth) = (keyWidth, valueWidth)
            (self.keyDType, self.valueDType) = (keyDType, valueDType)
        }
    }

    /// A cache for one layer.
    ///
    /// - Parameters:
    ///   - size: How much it may hold.
    ///   - policy: What chooses.
    ///   - remainder: Whether evicted tokens go on answering.
    ///   - attends: Whether the model attends through this library. Without, the policy may look at
    ///     keys only, all heads of all layers must have one budget, and the remainder goes in as
    ///     plain rows.
    ///   - packing: How keys and values are stored.
    ///   - pressure: What may ask for less memory while the cache is in use.
    /// - Throws: ``H2OError`` for settings out of range or a budget without room to evict.
    public init(
        _ size: Size, policy: any Policy = Distinct(), remainder: Bool = true, attends: Bool = true,
        packing: Packing = .dense, pressure: MemoryPressure? = nil
    ) throws {
        try policy.validate()
        if !attends && policy.needsAttention {
            throw H2OError.policyNeedsAttention(
                policy: type(of: policy).name, model: "a stock model")
        }
        if !attends && packing.packs {
            throw H2OError.configuration(
                "A model that attends by itself cannot read packed keys and values.")
        }
        self.size = size
        self.policy = policy
        self.remainderAnswers = remainder
        self.attends = attends
        self.packing = packing
        self.pressure = pressure
        // Budgets are known now unless they depend on the model's widths.
        switch size {
        case .tokens(let count): try checkBudgets([count])
        case .heads(let budgets):
            guard !budgets.isEmpty else {
                throw H2OError.configuration("Give one number of slots per KV head.")
            }
            try checkBudgets(budgets)
        case .bytes: break
        }
    }

    // MARK: mlx-swift-lm's cache protocol

    /// Take new rows in; return what stock attention is to attend to.
    ///
    /// - Parameters:
    ///   - keys: `[B, Hk, L, D]` with RoPE applied at `offset`.
    ///   - values: `[B, Hk, L, Dv]`.
    /// - Returns: Keys `[B, Hk, N, D]` and values `[B, Hk, N, Dv]`, old and new.
    public func update(keys: MLXArray, values: MLXArray) -> (MLXArray, MLXArray) {
        guard !attends else {
            fatalError(
                H2OError.policyNeedsAttention(
                    policy: type(of: policy).name, model: "this model"
                ).localizedDescription + " (H2OConfiguration.caches(for:) tells in time.)")
        }
        takeIn(keys: keys, values: values)
        let fetched = fetch()
        settle(store!.runs.map { attendedFields($0) })
        return (depends(input: fetched.0, dependencies: sideState()), fetched.1)
    }

    public func attend(
        queries: MLXArray, keys: MLXArray, values: MLXArray, scale: Float,
        mask: MLXFast.ScaledDotProductAttentionMaskMode = .none, sinks: MLXArray? = nil
    ) -> MLXArray {
        precondition(attends, "This cache was made for stock attention (attends: false).")
        if let output = decode(
            queries: queries, keys: keys, values: values, scale: scale, mask: mask, sinks: sinks)
        {
            return output
        }
        takeIn(keys: keys, values: values)
        attended = true
        let runs = store!.runs, group = queries.dim(1) / store!.heads
        var outputs: [MLXArray] = [], seen: [Fields] = [], windowMasses: [MLXArray?] = []
        var recentScores: [MLXArray] = []
        for run in runs {
            var fields = attendedFields(run)
            let heads = run.first * group ..< run.last * group, kept = fields["positions"]!.dim(2)
            let result = attend(
                run, fields, queries: queries.sliced(heads, axis: 1), scale: scale,
                mask: Mask(mask), sinks: sinks?.sliced(heads, axis: 0))
            if let scores = result.scores {
                fields["scores"] = scores.slicedLast(0 ..< kept)
                if recent != nil { recentScores.append(scores.slicedLast(kept ..< scores.dim(2))) }
            }
            outputs.append(result.output)
            seen.append(fields)
            windowMasses.append(result.windowMass)
        }
        if !recentScores.isEmpty { recent!.writeScores(joined(recentScores, axis: 1)) }
        settle(seen, windowMasses)
        return depends(input: joined(outputs, axis: 1), dependencies: sideState())
    }

    /// The mask that models ask for before n new tokens.
    ///
    /// - Returns: None or causal where attention is ours, or booleans `[n, kept + n]` if asked for an
    ///   array; with plain rows an array `[1, 1, n, rows + kept + n]` to add to the logits.
    public func makeMask(
        n: Int, windowSize: Int?, returnArray: Bool
    ) -> MLXFast.ScaledDotProductAttentionMaskMode {
        precondition(
            windowSize == nil,
            "This model masks a sliding window over a full cache, which a bounded cache cannot "
                + "serve: leave that layer's own cache in place.")
        yieldToPressure()
        let kept = physicalLength
        if let heldStore, heldStore.reserved > 0, evictedAfter(n) > 0 {
            return .array(plainRowsMask(n, kept: kept))
        }
        if n == 1 { return .none }
        if returnArray {
            return .array(positions(0 ..< kept + n) .<= positions(kept ..< kept + n).column)
        }
        return .causal
    }

    /// The mean number of slots of a KV head, once known.
    public var maxSize: Int? {
        if let fullBudgets { return fullBudgets.reduce(0, +) / fullBudgets.count }
        return switch size {
        case .tokens(let count): count
        case .heads(let budgets): budgets.reduce(0, +) / budgets.count
        case .bytes: nil
        }
    }

    /// Whether the newest tokens can be taken back: until the first eviction.
    public var isTrimmable: Bool {
        heldStore?.runs.allSatisfy { evicted($0) == 0 } ?? true
    }

    /// Take back the newest n tokens; their attention stays in the scores of older ones.
    ///
    /// - Returns: How many were taken back: 0 once anything was evicted.
    @discardableResult
    public func trim(_ n: Int) -> Int {
        guard heldStore != nil, isTrimmable else { return 0 }
        let n = min(n, offset)
        guard n > 0 else { return 0 }
        offset -= n
        let older = n - (recent?.trim(n) ?? 0)
        for i in store!.runs.indices { store!.runs[i].length -= older }
        forgetVictims()
        return n
    }

    /// Every array held: evaluated after each prompt chunk, or the graph grows. Of what kernels change
    /// in place nobody else gets hold: their last outputs stand for it.
    public func innerState() -> [MLXArray] {
        decoding?.sideState ?? namedArrays.map(\.array)
    }

    public func copy() -> any KVCache {
        let twin = try! H2OKVCache(
            size, policy: policy, remainder: remainderAnswers, attends: attends, packing: packing,
            pressure: pressure)
        // Arrays are never changed in place while two hold them, so both may.
        (twin.offset, twin.store, twin.remainder) = (offset, store, remainder)
        (twin.victims, twin.rowTypes, twin.attended) = (victims, rowTypes, attended)
        twin.recent = recent
        (twin.pressureShare, twin.fullBudgets) = (pressureShare, fullBudgets)
        return twin
    }

    // MARK: what is held

    /// Tokens physically held by the head that holds most.
    public var physicalLength: Int {
        (heldStore?.runs.map(\.length).max() ?? 0) + (recent?.length ?? 0)
    }

    public var nbytes: Int {
        decoding?.nbytes ?? namedArrays.reduce(0) { $0 + $1.array.nbytes }
    }

    public var evicted: Int {
        guard let heldStore else { return 0 }
        return heldStore.runs.reduce(0) { $0 + $1.heads * evicted($1) } / heldStore.heads
    }

    public var budgets: [Int]? {
        if let heldStore {
            return heldStore.runs.flatMap { Array(repeating: budget(of: $0), count: $0.heads) }
        }
        if case .heads(let budgets) = size { return budgets }
        return nil
    }

    /// What stays of the evicted; nil before the first rows.
    public var evictedRemainder: Remainder? { remainder }

    public func keptPositions() -> [[[Int]]] {
        held.map { $0.map { $0.map { Int($0.position) } } }
    }

    public func keptScores() -> [[[Float]]] {
        held.map { $0.map { $0.map(\.score) } }
    }

    /// Positions and scores per batch entry and head, in order of position.
    private var held: [[[(position: Int32, score: Float)]]] {
        guard let store, let rowTypes else { return [] }
        var held = Array(
            repeating: [[(position: Int32, score: Float)]](), count: rowTypes.batch)
        for run in store.runs {
            let fields = positionsAndScores(run, store.views(run))
            let places = fields["positions"]!.asArray(Int32.self)
            let scores =
                fields["scores"]?.asArray(Float.self) ?? Array(repeating: 0, count: places.count)
            let length = fields["positions"]!.dim(2)
            for b in 0 ..< rowTypes.batch {
                for head in 0 ..< run.heads {
                    let first = (b * run.heads + head) * length, range = first ..< first + length
                    held[b].append(
                        zip(places[range], scores[range]).map { (position: $0, score: $1) }
                            .sorted { $0.position < $1.position })
                }
            }
        }
        return held
    }

    /// Change the budget; what no longer fits goes into the remainder.
    ///
    /// Between steps only, and for all layers of a stock model alike.
    ///
    /// - Parameter budgets: Slots of each KV head, or one number for all. The remainder is not
    ///   charged again.
    /// - Throws: ``H2OError/configuration(_:)`` for a budget without room to evict.
    public func resize(_ budgets: [Int]) throws {
        let heads = rowTypes?.heads ?? 1
        let budgets = budgets.count == 1 ? Array(repeating: budgets[0], count: heads) : budgets
        if store != nil && budgets.count != heads {
            throw H2OError.configuration("Give one budget for each of \(heads) KV heads.")
        }
        try checkBudgets(budgets)
        guard store != nil else {
            size = budgets.count == 1 ? .tokens(budgets[0]) : .heads(budgets)
            return
        }
        size = .heads(budgets)
        let slots = try recent == nil ? budgets : resizeRecent(budgets)
        store!.regroup(slots)
        forgetVictims()
        settle(store!.runs.map { attendedFields($0) })
        // Heads that have become alike form one run again.
        store!.regroup(slots)
        forgetVictims()
        chooseVictims()
    }

    /// Throw unless the policy and the model can work with these budgets.
    private func checkBudgets(_ budgets: [Int]) throws {
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

    /// Slots of each head for rows like these, and how many plain rows they reserve.
    func resolvedBudgets(_ rows: RowTypes) throws -> (budgets: [Int], reserved: Int) {
        let widths = RowWidths(
            key: rows.keyWidth, value: rows.valueWidth, keySize: rows.keyDType.size,
            valueSize: rows.valueDType.size, packing: packing)
        var budgets: [Int]
        switch size {
        case .heads(let given): budgets = given
        case .tokens(let count):
            budgets = Array(
                repeating: count - widths.remainderSlots(remembers), count: rows.heads)
        case .bytes(let bytes):
            let slots = try widths.slots(
                bytes: bytes, heads: rows.batch * rows.heads, policy: policy, remembers: remembers)
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
        try checkBudgets(budgets)
        return (budgets, reserved)
    }

    /// Whether statistics of the evicted are kept at all.
    var remembers: Bool { remainderAnswers || type(of: policy).usesEvictedMean }
}
