import CMLXH2O
import MLX

/// A layer's bounded cache as the C++ engine of c_api holds it.
///
/// A thin class over the C handle: a status that is not 0 becomes an error, and an `MLXArray` is the
/// `mlx_array` in it, in both directions, so that no row is copied on the way. Everything is lazy as in
/// MLX: evaluate the outputs of each step. One thread at a time may use it.
///
/// Shapes: B batch, Hq query heads, Hk KV heads, L new tokens, D and Dv the widths of keys and values.
final class Engine {
    private(set) var handle: mlx_h2o_cache
    /// Whether the policy accumulates scores.
    let accumulates: Bool
    private var lastStream: StreamOrDevice?

    /// The default stream, which is kept until the next call: its handle alone would not keep it.
    var stream: mlx_stream {
        let now = StreamOrDevice.default
        lastStream = now
        return now.ctx
    }

    /// The engine's version.
    static var version: String { String(cString: mlx_h2o_version()) }

    /// A cache without tokens.
    ///
    /// - Parameters:
    ///   - settings: What it is to be; its size is that of the plan.
    ///   - plan: Slots of each KV head, plain rows' among them, and those that follow.
    /// - Throws: ``H2OError/configuration(_:)`` for what makes no cache.
    init(_ settings: CacheSettings, _ plan: SlotPlan) throws {
        _ = installedEvaluator
        let policy = try EnginePolicy(settings.policy)
        var made = mlx_h2o_cache_new()
        try settings.withEngineOptions(plan) { options in
            var options = options
            try checkEngine(
                mlx_h2o_cache_make(
                    &made, policy.handle, plan.budgets.map { Int32(clamping: $0) },
                    plan.budgets.count, &options))
        }
        (handle, accumulates) = (made, settings.policy.needsAttention)
        if !settings.pins.isEmpty { try pin(settings.pins) }
    }

    private init(_ handle: mlx_h2o_cache, accumulates: Bool) {
        (self.handle, self.accumulates) = (handle, accumulates)
    }

    deinit { mlx_h2o_cache_free(handle) }

    /// A cache that holds the same and goes on by itself; nothing is copied until one of the two
    /// changes it.
    func copied() throws -> Engine {
        var twin = mlx_h2o_cache_new()
        try checkEngine(mlx_h2o_cache_copy(&twin, handle, stream))
        return Engine(twin, accumulates: accumulates)
    }

    // MARK: a step

    /// Takes new rows in, attends causally to them and to all that is held, then chooses what to forget.
    ///
    /// - Parameters:
    ///   - queries: `[B, Hq, L, D]` with RoPE applied at ``offset``.
    ///   - keys: `[B, Hk, L, D]`, likewise.
    ///   - values: `[B, Hk, L, Dv]`.
    ///   - scale: Factor on q.k.
    ///   - mask: Of an array the last L columns are for the new rows; what was held is always visible.
    ///   - sinks: Attention-sink logits `[Hq]`.
    /// - Returns: `[B, Hq, L, Dv]`.
    func attend(
        queries: MLXArray, keys: MLXArray, values: MLXArray, scale: Float,
        mask: MLXFast.ScaledDotProductAttentionMaskMode = .causal, sinks: MLXArray? = nil
    ) throws -> MLXArray {
        let sinks = sinks ?? .mlxNone, array = mask.mask ?? .mlxNone
        return try engineArray {
            mlx_h2o_cache_update_and_attend(
                &$0, handle, queries.ctx, keys.ctx, values.ctx, scale, mask.engineMode, array.ctx,
                sinks.ctx, stream)
        }
    }

    /// Takes new rows `[B, Hk, L, D]` and `[B, Hk, L, Dv]` in for a model that attends by itself.
    ///
    /// - Returns: What it is to attend to, `[B, Hk, N, D]` and `[B, Hk, N, Dv]`, plain rows of the evicted
    ///   first. What to add to its logits ``makeMask(n:asArray:)`` told before.
    func update(keys: MLXArray, values: MLXArray) throws -> (keys: MLXArray, values: MLXArray) {
        var (allKeys, allValues, mask) = (mlx_array_new(), mlx_array_new(), mlx_array_new())
        let status = mlx_h2o_cache_update_and_fetch(
            &allKeys, &allValues, &mask, handle, keys.ctx, values.ctx, stream)
        let fetched = (MLXArray(allKeys), MLXArray(allValues))
        mlx_array_free(mask)
        try checkEngine(status)
        return fetched
    }

    /// The mask that n new tokens will need.
    func makeMask(
        n: Int, asArray: Bool
    ) throws -> MLXFast.ScaledDotProductAttentionMaskMode {
        var mode: UnsafePointer<CChar>?
        let array = try engineArray {
            mlx_h2o_cache_make_mask(&mode, &$0, handle, Int32(clamping: n), asArray, stream)
        }
        if array.ctx.ctx != nil { return .array(array) }
        return mode.map { String(cString: $0) } == "causal" ? .causal : .none
    }

    // MARK: between steps

    /// Takes the newest n tokens back; nothing if n is more than ``undoableSteps``, which throws.
    func undoSteps(_ n: Int) throws {
        try checkEngine(mlx_h2o_cache_trim(handle, Int32(clamping: n), stream))
    }

    /// Gives each KV head other slots, and others that follow; what no longer fits goes into the
    /// remainder.
    func resize(_ plan: SlotPlan) throws {
        let slots = plan.budgets.map { Int32(clamping: $0) }, later = plan.laterNumbers
        try checkEngine(
            mlx_h2o_cache_resize(
                handle, slots, slots.count, later, plan.later.count, stream))
    }

    /// Whether kernels compute where there are some.
    func useKernels(_ use: Bool) { mlx_h2o_cache_use_kernels(handle, use) }

    /// Never evicts the tokens at these positions.
    ///
    /// - Returns: At how many of them some head has lost its token already.
    @discardableResult
    func pin(_ spans: [Range<Int>]) throws -> Int {
        let ends = spans.flatMap {
            [Int32(clamping: $0.lowerBound), Int32(clamping: $0.upperBound)]
        }
        var missing: Int32 = 0
        try checkEngine(mlx_h2o_cache_pin(&missing, handle, ends, spans.count, stream))
        return Int(missing)
    }

    /// Lets pinned tokens go as any others.
    func unpin() throws { try checkEngine(mlx_h2o_cache_unpin(handle, stream)) }

    /// Begins a turn, of which `carry` of the past counts, from 0 to 1.
    func newTurn(carry: Double) throws {
        try checkEngine(mlx_h2o_cache_new_turn(handle, carry, stream))
    }

    // MARK: saving

    /// All that a cache holds: arrays by name, and the rest as JSON.
    struct Saved {
        let arrays: [String: MLXArray]
        let settings: String
    }

    /// Arrays by name and the rest as JSON; copies of arrays that kernels have meanwhile.
    func saved() throws -> Saved {
        var map = mlx_map_string_to_array_new(), text = mlx_string_new()
        defer {
            mlx_map_string_to_array_free(map)
            mlx_string_free(text)
        }
        try checkEngine(mlx_h2o_cache_arrays(&map, &text, handle, stream))
        return Saved(arrays: arrays(of: map), settings: String(cString: mlx_string_data(text)))
    }

    /// A cache that holds what was saved.
    ///
    /// - Throws: ``H2OError/file(_:)`` for anything that no cache can have saved.
    convenience init(_ saved: Saved, policy: any H2OPolicy) throws {
        self.init(mlx_h2o_cache_new(), accumulates: policy.needsAttention)
        try hold(saved, policy: policy)
    }

    /// Hold what was saved, in the place of all that this holds.
    ///
    /// - Throws: ``H2OError/file(_:)`` for anything that no cache can have saved; nothing is changed then.
    func hold(_ saved: Saved, policy: any H2OPolicy) throws {
        _ = installedEvaluator
        // The settings hold all of the library's.
        let own = policy is H2OPolicies.Own ? try EnginePolicy(policy) : nil
        let stream = StreamOrDevice.default
        let map = engineMap(of: saved.arrays)
        defer { mlx_map_string_to_array_free(map) }
        try withExtendedLifetime((own, stream)) {
            try checkEngine(
                mlx_h2o_cache_restore(
                    &handle, own?.handle ?? mlx_h2o_policy_new(), map, saved.settings, stream.ctx))
        }
    }
}
