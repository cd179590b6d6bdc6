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

    var core: Core
    /// Arrays set by `state` whose names `metaState` has not told yet.
    private var unnamed: [MLXArray]?
    /// Tokens that `trim` was asked for in vain.
    private(set) var vainTrim: Int?

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
    ///   - undo: How many of the last steps can be taken back after evictions (``trim(_:)``): as many
    ///     as a draft of speculative decoding has tokens. A chunk of up to one more goes token by token,
    ///     and no step is fused on a GPU.
    ///   - frame: In which packed keys are stored, and everything that is made of them.
    ///   - saturation: Where each KV head's remainder saturates (``Remainder/saturation``), or one number
    ///     for all; 0 is first order.
    ///   - pressure: What may ask for less memory while the cache is in use.
    /// - Throws: ``H2OError`` for settings out of range or a budget without room to evict.
    public convenience init(
        _ size: Size, policy: any Policy = Policies.Salient(), remainder: Bool = true,
        attends: Bool = true, packing: H2OPacking = .dense, undo: Int = 0, frame: H2OFrame? = nil,
        saturation: [Float] = [Remainder.saturation], pressure: MemoryPressure? = nil
    ) throws {
        let settings = try CacheSettings(
            size, policy: policy, remainder: remainder, attends: attends, packing: packing,
            undo: undo, frame: frame, saturation: saturation)
        self.init(settings, PressureShare(pressure, nil))
    }

    convenience init(_ settings: CacheSettings, _ pressure: PressureShare) {
        self.init(Core(settings, pressure))
    }

    private init(_ core: Core) { self.core = core }

    /// As given; the slots of each head once they are known.
    public var size: Size { core.settings.size }
    /// What chooses.
    public var policy: any Policy { core.settings.policy }
    /// Whether evicted tokens go on answering.
    public var remainderAnswers: Bool { core.settings.remainderAnswers }
    /// Whether this library computes the attention.
    public var attends: Bool { core.settings.attends }
    /// How keys and values are stored.
    public var packing: H2OPacking { core.settings.packing }
    /// In which packed keys are stored, and ``evictedRemainder`` too.
    public var frame: H2OFrame? { core.settings.frame }
    /// Where each KV head's remainder saturates, or one number for all.
    public var saturation: [Float] { core.settings.saturation }
    /// How many of the last steps can be taken back after evictions.
    public var undo: Int { core.settings.undo }
    /// The next logical position.
    public var offset: Int { core.offset }

    // MARK: steps

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
        checkReady()
        return core.update(keys: keys, values: values)
    }

    public func attend(
        queries: MLXArray, keys: MLXArray, values: MLXArray, scale: Float,
        mask: MLXFast.ScaledDotProductAttentionMaskMode = .none, sinks: MLXArray? = nil
    ) -> MLXArray {
        require(attends, "This cache was made for stock attention (attends: false).")
        checkReady()
        return core.updateAndAttend(
            NewTokens(
                queries: queries, keys: keys, values: values, scale: scale, mask: Mask(mask),
                sinks: sinks))
    }

    /// Stop with a message where what the cache holds is not what the model thinks.
    private func checkReady() {
        if let vainTrim {
            fatalError(
                "After trim(\(vainTrim)), which took nothing back: "
                    + Self.tooFar(vainTrim, undoableSteps))
        }
        require(unnamed == nil, "The state of this cache was set without its metaState.")
    }

    /// The mask that models ask for before n new tokens.
    ///
    /// - Returns: None or causal where attention is ours, or booleans `[n, kept + n]` if asked for an
    ///   array; with plain rows an array `[1, 1, n, rows + kept + n]` to add to the logits.
    public func makeMask(
        n: Int, windowSize: Int?, returnArray: Bool
    ) -> MLXFast.ScaledDotProductAttentionMaskMode {
        require(
            windowSize == nil,
            "This model masks a sliding window over a full cache, which a bounded cache cannot "
                + "serve: leave that layer's own cache in place.")
        core.follow(to: offset)
        if let mask = core.layer?.plainRowsMask(n) { return .array(mask) }
        if n == 1 { return .none }
        if returnArray {
            let kept = physicalLength
            return .array(positions(0 ..< kept + n) .<= positions(kept ..< kept + n).column)
        }
        return .causal
    }

    // MARK: between steps

    public func copy() -> any KVCache {
        let twin = H2OKVCache(core.copied())
        twin.vainTrim = vainTrim
        return twin
    }

    /// Change the budget; what no longer fits goes into the remainder.
    ///
    /// Between steps only, and for all layers of a stock model alike.
    ///
    /// - Parameter budgets: Slots of each KV head, or one number for all. The remainder is not
    ///   charged again.
    /// - Throws: ``H2OError/configuration(_:)`` for a budget without room to evict; nothing is changed.
    public func resize(_ budgets: [Int]) throws { try core.resize(budgets) }

    /// How many of the newest tokens can be taken back now.
    ///
    /// The last ``undo`` steps can be taken back exactly, evictions or not: what follows is what would
    /// have followed without them. Before the first eviction any older token can go as well; its
    /// attention then stays in the scores of older ones.
    public var undoableSteps: Int { core.undoableSteps }

    /// Whether the newest tokens can be taken back, as far as ``undoableSteps`` says.
    ///
    /// Without `undo` until the first eviction, and never while the cache is empty: speculative
    /// decoding asks once, before the prompt, and would go on after an eviction with drafts that
    /// stay. With it always.
    public var isTrimmable: Bool { undo > 0 || offset > 0 && !core.hasEvicted }

    /// Whether as many tokens can be taken back once they have come.
    public func isTrimmable(after positions: Int) -> Bool {
        if positions <= undo { return isTrimmable }
        guard isTrimmable, let fewest = budgets?.min() else { return false }
        // Slots that are shared out anew evict too.
        let next = core.settings.filling.first?.beyond ?? .max
        return offset + positions <= min(fewest, next)
    }

    /// Take back the newest n tokens, or all.
    ///
    /// Where not so many can be taken back nothing is. `ChatSession` then begins anew; code that goes
    /// on with the cache, as speculative decoding does, would go on with tokens that were never
    /// said: the next token ends the process with a message.
    ///
    /// - Returns: How many were taken back: n, or fewer where there were no more, or 0.
    @discardableResult
    public func trim(_ n: Int) -> Int {
        let n = min(n, offset)
        guard n > 0 else { return 0 }
        guard n <= undoableSteps else {
            vainTrim = n
            return 0
        }
        takeOff(n)
        return n
    }

    /// Take back the newest n tokens.
    ///
    /// - Throws: ``H2OError/configuration(_:)`` if not so many can be taken back; nothing is then.
    public func undoSteps(_ n: Int) throws {
        guard 0 ... undoableSteps ~= n else {
            throw H2OError.configuration(Self.tooFar(n, undoableSteps))
        }
        if n > 0 { takeOff(n) }
    }

    private func takeOff(_ n: Int) {
        vainTrim = nil
        core.takeOff(n)
    }

    private static func tooFar(_ n: Int, _ most: Int) -> String {
        "\(n) tokens cannot be taken back, \(most) can: make the cache with undo: \(n) or more "
            + "(speculative decoding needs the number of draft tokens)."
    }

    // MARK: what is held

    /// The mean number of slots of a KV head, once known.
    public var maxSize: Int? {
        if let mean = core.meanSlots { return mean }
        return switch size {
        case .tokens(let count): count
        case .heads(let budgets): budgets.reduce(0, +) / budgets.count
        case .bytes: nil
        }
    }

    /// Tokens physically held by the head that holds most.
    public var physicalLength: Int { core.layer?.longest ?? 0 }

    public var budgets: [Int]? {
        if let layer = core.layer { return layer.budgets }
        if case .heads(let budgets) = size { return budgets }
        return nil
    }

    public var evicted: Int { core.layer?.meanEvicted ?? 0 }

    public var nbytes: Int { core.nbytes }

    /// Every array held: evaluated after each prompt chunk, or the graph grows. What kernels change in
    /// place is not among them: their last outputs stand for it.
    public func innerState() -> [MLXArray] { core.heldArrays }

    /// What stays of the evicted, in the ``frame``; nil before the first rows.
    public var evictedRemainder: Remainder? { layer?.remainder }

    public func keptPositions() -> [[[Int]]] {
        (layer?.held ?? []).map { $0.map { $0.map { Int($0.position) } } }
    }

    public func keptScores() -> [[[Float]]] {
        (layer?.held ?? []).map { $0.map { $0.map(\.score) } }
    }

    /// The layer with all its rows; nil before the first.
    var layer: Layer? { core.layerAtRest() }
    /// Batch, heads, widths and dtypes that rows must have, once known.
    var rowTypes: RowTypes? { core.layer?.rowTypes }
    /// Slots of each head without memory pressure, once known.
    var fullBudgets: [Int]? { core.fullBudgets }
    /// Whether kernels have the rows.
    var isDecoding: Bool { core.isDecoding }

    // MARK: saving

    /// Every array held, by name, names ascending.
    var namedArrays: [(name: String, array: MLXArray)] { core.namedArrays() }

    /// Everything else, in the form that Python's `H2OKVCache.config` has.
    var configuration: SettingValue { core.configuration }

    /// Arrays in the order in which ``metaState`` names them. While kernels decode, what they wrote
    /// last, as in ``innerState()``: it may be evaluated with every token. Reading `metaState` first
    /// takes the rows back.
    public var state: [MLXArray] {
        get { isDecoding ? core.heldArrays : namedArrays.map(\.array) }
        set { unnamed = newValue }
    }

    /// The configuration as JSON, then names of ``state``'s arrays. Read it before them, set it after.
    public var metaState: [String] {
        get { [configuration.text] + namedArrays.map(\.name) }
        set {
            let arrays = unnamed ?? []
            unnamed = nil
            guard newValue.count == arrays.count + 1,
                let configuration = try? SettingValue(parsing: newValue[0])
            else {
                fatalError(
                    "This metaState does not go with this state: read metaState first, then state.")
            }
            do {
                let named = zip(newValue.dropFirst(), arrays)
                try core.restore(Dictionary(named) { first, _ in first }, configuration)
                vainTrim = nil
            } catch {
                fatalError(error.localizedDescription)
            }
        }
    }
}

extension H2OKVCache {
    /// A cache from another's arrays and configuration.
    static func restored(
        _ arrays: [String: MLXArray], _ configuration: SettingValue,
        _ pressure: PressureShare = PressureShare(nil, nil)
    ) throws -> H2OKVCache {
        let settings = try CacheSettings(configuration)
        let cache = H2OKVCache(settings, pressure)
        try cache.core.restore(arrays, configuration)
        return cache
    }
}
