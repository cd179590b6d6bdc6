import MLX
import MLXLMCommon

/// What a cache was made with and what it holds.
extension H2OKVCache {
    /// What it is to be; slots, those that follow and pins as they are now.
    var settings: CacheSettings {
        guard let engine else { return given }
        var settings = given
        let plan = engine.plan
        (settings.budgets, settings.filling) = (plan.budgets, plan.later)
        settings.pins = engine.pins
        return settings
    }

    /// What chooses.
    public var policy: any H2OPolicy { given.policy }
    /// Whether evicted tokens go on answering.
    public var remainderAnswers: Bool { given.remainderAnswers }
    /// Whether this library computes the attention.
    public var attends: Bool { given.attends }
    /// How keys and values are stored.
    public var packing: H2OPacking { given.packing }
    /// In which packed keys are stored, and ``evictedRemainder`` too.
    var frame: H2OFrame? { given.frame }
    /// The RoPE of the keys, where queries see them at positions without gaps.
    public var rope: H2ORope? { given.rope }
    /// Where each KV head's remainder saturates, or one number for all.
    public var saturation: [Float] { given.saturation }
    /// How many of the last steps can be taken back after evictions.
    public var undo: Int { given.undo }
    /// The next logical position.
    public var offset: Int { engine?.offset ?? 0 }

    /// How many of the newest tokens can be taken back now.
    ///
    /// The last ``undo`` steps can be taken back exactly, evictions or not: what follows is what would
    /// have followed without them. Before the first eviction any older token can go as well; its
    /// attention then stays in the scores of older ones.
    public var undoableSteps: Int { engine?.undoableSteps ?? 0 }

    /// Whether the newest tokens can be taken back, as far as ``undoableSteps`` says.
    ///
    /// Without `undo` until the first eviction, and never while the cache is empty: speculative
    /// decoding asks once, before the prompt, and would go on after an eviction with drafts that
    /// stay. With it always.
    public var isTrimmable: Bool { undo > 0 || undoableSteps > 0 }

    /// Whether as many tokens can be taken back once they have come.
    public func isTrimmable(after positions: Int) -> Bool {
        if positions <= undo { return isTrimmable }
        guard isTrimmable, let fewest = budgets?.min() else { return false }
        // Slots that are shared out anew evict too.
        let next = settings.filling.first?.beyond ?? .max
        return offset + positions <= min(fewest - given.plainRows(of: fewest), next)
    }

    /// The mean number of slots of a KV head in a conversation that begins, without memory pressure.
    public var maxSize: Int? {
        let slots = pressure.full?.budgets ?? settings.budgets
        return slots.isEmpty ? nil : slots.reduce(0, +) / slots.count
    }

    /// Tokens physically held by the head that holds most.
    public var physicalLength: Int { engine?.physicalLength ?? 0 }

    /// Slots of each KV head, plain rows of the evicted among them; nil until they are known.
    public var budgets: [Int]? { engine?.plan.budgets }

    /// Tokens dropped so far, mean over KV heads.
    public var evicted: Int { engine?.evicted ?? 0 }

    /// Bytes of everything held.
    public var nbytes: Int { engine?.nbytes ?? 0 }

    /// Every array held: evaluated after each prompt chunk, or the graph grows. What kernels change in
    /// place is not among them: their last outputs stand for it.
    public func innerState() -> [MLXArray] {
        reporting([]) { try engine?.innerState() ?? [] }
    }

    /// What stays of the evicted, in the ``frame``; nil before the first rows, and where nothing is kept
    /// of them.
    var evictedRemainder: H2ORemainder? {
        get throws {
            guard let engine, offset > 0, given.remembers else { return nil }
            return H2ORemainder(try engine.remainder())
        }
    }

    /// Logical positions of the kept tokens of each KV head, ascending: per batch entry and head.
    ///
    /// Reads from the device, so not for every step.
    ///
    /// - Throws: ``H2OError``: what the device or MLX could not.
    public func keptPositions() throws -> [[[Int]]] { try engine?.keptPositions() ?? [] }

    /// What the policy has accumulated for them, in the same order; zeros where it looks at keys only.
    ///
    /// - Throws: As ``keptPositions()``.
    public func keptScores() throws -> [[[Float]]] { try engine?.keptScores() ?? [] }

    /// Batch, heads, widths and dtypes that rows must have, once known.
    var rowTypes: RowTypes? { engine?.rowTypes }

    /// A cache from another's arrays and configuration.
    static func restored(
        _ arrays: [String: MLXArray], _ configuration: H2OSettingValue,
        _ pressure: PressureShare = PressureShare(nil, nil)
    ) throws -> H2OKVCache {
        let settings = try CacheSettings(configuration, frame: H2OFrame(saved: arrays))
        let cache = try H2OKVCache(settings, pressure)
        try cache.restore(Engine.Saved(arrays: arrays, settings: configuration.text))
        return cache
    }
}
