import CMLXH2O
import MLX

/// What the engine's cache holds.
extension Engine {
    /// The next logical position.
    var offset: Int { number { mlx_h2o_cache_offset($0, handle) } }
    /// Tokens held by the head that holds most.
    var physicalLength: Int { number { mlx_h2o_cache_size($0, handle) } }
    /// Whether kernels have the rows between steps.
    var isFused: Bool {
        var fused = false
        mlx_h2o_cache_is_fused(&fused, handle)
        return fused
    }
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

    /// Slots of each KV head, plain rows' among them, and those that follow.
    var plan: SlotPlan {
        let budgets = numbers(of: 1) { mlx_h2o_cache_budgets($0, &$1, handle) }
        let heads = budgets.count
        var options = mlx_h2o_cache_options_default()
        mlx_h2o_cache_get_options(&options, handle)
        let later = UnsafeBufferPointer(
            start: options.filling, count: options.n_stages * (1 + heads)
        ).map { Int($0) }
        return SlotPlan(
            budgets: budgets.map { Int($0) },
            later: (0 ..< options.n_stages).map {
                let first = $0 * (1 + heads), stage = later[first ..< first + 1 + heads]
                return Stage(beyond: stage.first!, budgets: Array(stage.dropFirst()))
            })
    }

    /// Spans of positions that are pinned, in order.
    var pins: [Range<Int>] {
        spans { mlx_h2o_cache_pins($0, &$1, handle) }
    }

    /// At which positions the last ``pin(_:)`` found that some head had lost its token.
    var missing: [Range<Int>] {
        spans { mlx_h2o_cache_missing($0, &$1, handle) }
    }

    private typealias Read = (UnsafeMutablePointer<Int32>?, inout Int) -> Int32

    private func spans(_ read: Read) -> [Range<Int>] {
        let ends = numbers(of: 2, read)
        return stride(from: 0, to: ends.count, by: 2).map {
            Int(ends[$0]) ..< Int(ends[$0 + 1])
        }
    }

    /// What a reader gives, so many numbers each, once it has said how many.
    private func numbers(of each: Int, _ read: Read) -> [Int32] {
        var count = 0
        _ = read(nil, &count)
        var all = [Int32](repeating: 0, count: each * count)
        _ = all.withUnsafeMutableBufferPointer { read($0.baseAddress, &count) }
        return all
    }

    /// Batch, heads, widths and dtypes of its rows; nil before the first.
    var rowTypes: RowTypes? {
        var types = mlx_h2o_row_types()
        types.size = MemoryLayout<mlx_h2o_row_types>.size
        guard mlx_h2o_cache_row_types(&types, handle) == 0 else { return nil }
        func dtype(_ code: mlx_dtype) -> DType {
            RowTypes.dtypes.first { $0.cmlxDtype == code } ?? .float32
        }
        return RowTypes(
            batch: Int(types.batch), heads: Int(types.n_kv_heads), keyWidth: Int(types.key_width),
            valueWidth: Int(types.value_width), keyDType: dtype(types.key_dtype),
            valueDType: dtype(types.value_dtype))
    }

    /// All arrays held; of what kernels change in place, what they wrote last.
    func innerState() throws -> [MLXArray] {
        var list = mlx_vector_array_new()
        defer { mlx_vector_array_free(list) }
        try checkEngine(mlx_h2o_cache_inner_state(&list, handle))
        return arrays(of: list)
    }

    /// Positions held, ascending, of each batch entry and KV head.
    func keptPositions() throws -> [[[Int]]] {
        try contents().map { $0.map { $0.map(\.position) } }
    }

    /// What the policy has accumulated for them, in the same order; zeros where it looks at keys only.
    func keptScores() throws -> [[[Float]]] { try contents().map { $0.map { $0.map(\.score) } } }

    /// Statistics of the evicted: count `[B, Hk]`, mean key, its variance and mean value.
    func remainder() throws -> [MLXArray] {
        var parts = mlx_h2o_remainder_new()
        let status = mlx_h2o_cache_remainder(&parts, handle, stream)
        let arrays = [parts.count, parts.mean_key, parts.var_key, parts.mean_value]
            .map { MLXArray($0) }
        try checkEngine(status)
        return arrays
    }

    private func contents() throws -> [[[(position: Int, score: Float)]]] {
        guard offset > 0 else { return [] }
        let positions = try engineArray { mlx_h2o_cache_kept(&$0, handle, stream) }
        let places = positions.asArray(Int32.self), width = positions.dim(2)
        let scores =
            accumulates
            ? try engineArray { mlx_h2o_cache_scores(&$0, handle, stream) }.asArray(Float.self)
            : Array(repeating: 0, count: places.count)
        return (0 ..< positions.dim(0)).map { entry in
            (0 ..< positions.dim(1)).map { head in
                let first = (entry * positions.dim(1) + head) * width
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

}
