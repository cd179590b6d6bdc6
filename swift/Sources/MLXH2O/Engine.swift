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
    private let handle: mlx_h2o_cache
    /// Whether the policy accumulates scores.
    private let accumulates: Bool

    /// The engine's version.
    static var version: String { String(cString: mlx_h2o_version()) }

    /// A cache without tokens.
    ///
    /// - Parameters:
    ///   - settings: What it is to be. The policy is one of this library's.
    ///   - budgets: Slots of each KV head. Plain rows are taken from them.
    /// - Throws: ``H2OError/configuration(_:)`` for what makes no cache.
    init(_ settings: CacheSettings, budgets: [Int]) throws {
        _ = installedEvaluator
        let policy = try EnginePolicy(settings.policy)
        var made = mlx_h2o_cache_new()
        try settings.withEngineOptions(heads: budgets.count) { options in
            var options = options
            try checkEngine(
                mlx_h2o_cache_make(
                    &made, policy.handle, budgets.map { Int32(clamping: $0) }, budgets.count,
                    &options))
        }
        (handle, accumulates) = (made, settings.policy.needsAttention)
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
    ///   - sinks: Attention-sink logits `[Hq]`.
    /// - Returns: `[B, Hq, L, Dv]`.
    func attend(
        queries: MLXArray, keys: MLXArray, values: MLXArray, scale: Float, sinks: MLXArray? = nil
    ) throws -> MLXArray {
        let sinks = sinks ?? .mlxNone
        return try engineArray {
            mlx_h2o_cache_update_and_attend(
                &$0, handle, queries.ctx, keys.ctx, values.ctx, scale, sinks.ctx, stream)
        }
    }

    /// What stock attention is to attend to, and the array to add to its logits.
    struct Fetched {
        /// `[B, Hk, N, D]`, plain rows of the evicted first.
        let keys: MLXArray
        /// `[B, Hk, N, Dv]`.
        let values: MLXArray
        /// `[1, 1, L, N]` in the keys' dtype; nil: causal, aligned at the end.
        let mask: MLXArray?
    }

    /// Takes new rows `[B, Hk, L, D]` and `[B, Hk, L, Dv]` in for a model that attends by itself.
    func update(keys: MLXArray, values: MLXArray) throws -> Fetched {
        var (held, itsValues, mask) = (mlx_array_new(), mlx_array_new(), mlx_array_new())
        let status = mlx_h2o_cache_update_and_fetch(
            &held, &itsValues, &mask, handle, keys.ctx, values.ctx, stream)
        let (fetchedKeys, fetchedValues) = (MLXArray(held), MLXArray(itsValues))
        let fetchedMask = MLXArray(mask)
        try checkEngine(status)
        return Fetched(
            keys: fetchedKeys, values: fetchedValues, mask: mask.ctx == nil ? nil : fetchedMask)
    }

    // MARK: between steps

    /// Takes the newest n tokens back; nothing if n is more than ``undoableSteps``, which throws.
    func undoSteps(_ n: Int) throws {
        try checkEngine(mlx_h2o_cache_trim(handle, Int32(clamping: n), stream))
    }

    /// Gives each KV head other slots; what no longer fits goes into the remainder.
    func resize(_ budgets: [Int]) throws {
        let slots = budgets.map { Int32(clamping: $0) }
        try checkEngine(mlx_h2o_cache_resize(handle, slots, slots.count, stream))
    }

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

    // MARK: what is held

    /// The next logical position.
    var offset: Int { number { mlx_h2o_cache_offset($0, handle) } }
    /// Tokens held by the head that holds most.
    var physicalLength: Int { number { mlx_h2o_cache_size($0, handle) } }
    /// How many of the newest tokens can be taken back.
    var undoableSteps: Int { number { mlx_h2o_cache_trimmable($0, handle) } }

    /// Tokens dropped, mean over KV heads.
    var evicted: Int {
        var count: Int64 = 0
        mlx_h2o_cache_evicted(&count, handle)
        return Int(count)
    }

    /// Bytes of everything held.
    var nbytes: Int {
        var count = 0
        mlx_h2o_cache_nbytes(&count, handle)
        return count
    }

    /// Positions held, ascending, of each batch entry and KV head.
    func keptPositions() throws -> [[[Int]]] { try held().map { $0.map { $0.map(\.position) } } }

    /// What the policy has accumulated for them, in the same order; zeros where it looks at keys only.
    func keptScores() throws -> [[[Float]]] { try held().map { $0.map { $0.map(\.score) } } }

    /// Statistics of the evicted: count `[B, Hk]`, mean key, its variance and mean value.
    func remainder() throws -> [MLXArray] {
        var parts = mlx_h2o_remainder_new()
        let status = mlx_h2o_cache_remainder(&parts, handle, stream)
        let arrays = [parts.count, parts.mean_key, parts.var_key, parts.mean_value]
            .map { MLXArray($0) }
        try checkEngine(status)
        return arrays
    }

    private func held() throws -> [[[(position: Int, score: Float)]]] {
        guard offset > 0 else { return [] }
        let kept = try engineArray { mlx_h2o_cache_kept(&$0, handle, stream) }
        let places = kept.asArray(Int32.self), width = kept.dim(2)
        let scores =
            accumulates
            ? try engineArray { mlx_h2o_cache_scores(&$0, handle, stream) }.asArray(Float.self)
            : Array(repeating: 0, count: places.count)
        return (0 ..< kept.dim(0)).map { entry in
            (0 ..< kept.dim(1)).map { head in
                let first = (entry * kept.dim(1) + head) * width
                // A head that holds fewer has -1 at the end.
                return (first ..< first + width).filter { places[$0] >= 0 }
                    .map { (Int(places[$0]), scores[$0]) }
            }
        }
    }

    /// A count that the engine always knows.
    private func number(_ read: (UnsafeMutablePointer<Int32>) -> Int32) -> Int {
        var result: Int32 = 0
        _ = read(&result)
        return Int(result)
    }

    private var stream: mlx_stream { StreamOrDevice.default.ctx }
}
