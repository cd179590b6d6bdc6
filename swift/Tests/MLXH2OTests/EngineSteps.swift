import CMLXH2O
import CMLXH2OGolden
import MLX

@testable import MLXH2O

/// The steps of a cache one by one, as golden vectors replay them (c_api/include/mlx_h2o_golden.h).
enum EngineSteps {
    private static var stream: mlx_stream { StreamOrDevice.default.ctx }

    // MARK: the remainder

    private static func remainder(
        _ call: (inout mlx_h2o_remainder) -> Int32
    ) throws -> H2ORemainder {
        var parts = mlx_h2o_remainder_new()
        let status = call(&parts)
        let arrays = [parts.count, parts.mean_key, parts.var_key, parts.mean_value]
            .map { MLXArray($0) }
        try checkEngine(status)
        return H2ORemainder(arrays)
    }

    /// Handles that stay the arrays' own.
    private static func handles(_ remainder: H2ORemainder) -> mlx_h2o_remainder {
        mlx_h2o_remainder(
            count: remainder.count.ctx, mean_key: remainder.meanKey.ctx,
            var_key: remainder.varKey.ctx, mean_value: remainder.meanValue.ctx)
    }

    static func emptyRemainder(
        batch: Int, heads: Int, keyWidth: Int, valueWidth: Int
    ) throws -> H2ORemainder {
        try remainder {
            mlx_h2o_remainder_empty(
                &$0, Int32(batch), Int32(heads), Int32(keyWidth), Int32(valueWidth), stream)
        }
    }

    static func fold(
        _ statistics: H2ORemainder, keys: MLXArray, values: MLXArray, weights: MLXArray?
    ) throws -> H2ORemainder {
        let weights = weights ?? .mlxNone
        return try remainder {
            mlx_h2o_remainder_fold(
                &$0, handles(statistics), keys.ctx, values.ctx, weights.ctx, stream)
        }
    }

    static func column(
        _ statistics: H2ORemainder, queries: MLXArray, scale: Float, saturation: [Float]
    ) throws -> MLXArray {
        let each =
            saturation.count == 1
            ? Array(repeating: saturation[0], count: statistics.count.dim(1)) : saturation
        return try engineArray {
            mlx_h2o_remainder_column(&$0, handles(statistics), queries.ctx, scale, each, stream)
        }
    }

    static func join(
        _ out: MLXArray, _ lse: MLXArray, logits: MLXArray, values: MLXArray
    ) throws -> (out: MLXArray, lse: MLXArray) {
        try pair {
            mlx_h2o_remainder_join(
                &$0, &$1, out.ctx, lse.ctx, logits.ctx, values.ctx, stream)
        }
    }

    static func plainRows(
        _ statistics: H2ORemainder, _ rows: Int
    ) throws -> (keys: MLXArray, values: MLXArray) {
        try pair { mlx_h2o_remainder_rows(&$0, &$1, handles(statistics), Int32(rows), stream) }
    }

    private static func pair(
        _ call: (inout mlx_array, inout mlx_array) -> Int32
    ) throws -> (MLXArray, MLXArray) {
        var (a, b) = (mlx_array_new(), mlx_array_new())
        let status = call(&a, &b)
        let results = (MLXArray(a), MLXArray(b))
        try checkEngine(status)
        return results
    }

    // MARK: policies

    static func attentionMass(
        _ scores: MLXArray, logSumExp: MLXArray, heads: Int
    ) throws -> MLXArray {
        try engineArray {
            mlx_h2o_attention_mass(&$0, scores.ctx, logSumExp.ctx, Int32(heads), stream)
        }
    }

    static func accumulate(
        _ policy: any H2OPolicy, _ scores: MLXArray, logits: MLXArray, lse: MLXArray
    ) throws -> MLXArray {
        let policy = try EnginePolicy(policy)
        return try engineArray {
            mlx_h2o_accumulate(&$0, policy.handle, scores.ctx, logits.ctx, lse.ctx, stream)
        }
    }

    /// Slots `[B, Hk, N]` as a policy sees them.
    struct Slots {
        let keys, values, positions: MLXArray
        let scores: MLXArray?
        let evictedMeanKey: MLXArray
        let offset, evicted: Int

        func handles(_ evictable: MLXArray, _ scores: MLXArray) -> mlx_h2o_slots {
            mlx_h2o_slots(
                size: MemoryLayout<mlx_h2o_slots>.size, keys: keys.ctx, values: values.ctx,
                positions: positions.ctx, scores: scores.ctx,
                evictable: evictable.ctx, evicted_mean_key: evictedMeanKey.ctx,
                offset: Int32(offset), evicted: Int32(evicted))
        }
    }

    static func evictable(_ slots: Slots, sink: Int, recent: Int) throws -> MLXArray {
        try engineArray {
            mlx_h2o_evictable(
                &$0, slots.positions.ctx, Int32(slots.offset), Int32(sink), Int32(recent), stream)
        }
    }

    /// What each slot is worth keeping, `[B, Hk, N]`.
    ///
    /// - Parameter windowMass: Of a prompt: that of its last queries, nil inside where it is scored in
    ///   full.
    static func priority(
        _ policy: any H2OPolicy, _ slots: Slots, evictable: MLXArray,
        prompt windowMass: MLXArray?? = .none
    ) throws -> MLXArray {
        let policy = try EnginePolicy(policy), scores = slots.scores ?? .mlxNone
        var handles = slots.handles(evictable, scores)
        return try withExtendedLifetime((slots, scores)) {
            try engineArray {
                guard case .some(let array) = windowMass else {
                    return mlx_h2o_priority(&$0, policy.handle, &handles, stream)
                }
                let mass = array ?? .mlxNone
                return mlx_h2o_prompt_priority(&$0, policy.handle, &handles, mass.ctx, stream)
            }
        }
    }

    static func victims(
        _ priority: MLXArray, _ slots: Slots, evictable: MLXArray, count: Int,
        unit: H2OPolicyOptions.Unit
    ) throws -> MLXArray {
        try engineArray {
            mlx_h2o_select_victims(
                &$0, priority.ctx, slots.positions.ctx, evictable.ctx, Int32(count), unit == .layer,
                stream)
        }
    }

    static func kept(
        _ priority: MLXArray, _ slots: Slots, evictable: MLXArray, count: Int,
        unit: H2OPolicyOptions.Unit
    ) throws -> MLXArray {
        try engineArray {
            mlx_h2o_select_kept(
                &$0, priority.ctx, slots.positions.ctx, evictable.ctx, Int32(count), unit == .layer,
                stream)
        }
    }

    // MARK: a prompt that is read twice

    /// The greatest weight that each row of a layer received, `[B, Hk, N]`.
    static func worths(_ readings: EngineReadings, layer: Int) throws -> MLXArray {
        try engineArray { mlx_h2o_second_reading_worths(&$0, readings.handle, layer, stream) }
    }

    /// How many rows each head keeps, of worths `[H, T]`.
    static func sharedOut(_ worths: MLXArray, whole: Int, own: [Int]) throws -> [Int32] {
        var counts = own.map { Int32($0) }
        let own = counts
        try checkEngine(mlx_h2o_shared_out(&counts, worths.ctx, Int32(whole), own, stream))
        return counts
    }

    /// The values that a cache holds, `[B, Hk, N, Dv]`, in order of position, then zeros.
    static func values(_ cache: Engine) throws -> MLXArray {
        var (keys, values, positions) = (mlx_array_new(), mlx_array_new(), mlx_array_new())
        let status = mlx_h2o_cache_rows(&keys, &values, &positions, cache.handle, stream)
        let results = [keys, values, positions].map { MLXArray($0) }
        try checkEngine(status)
        return results[1]
    }
}

/// Rows in affine quantization, as the engine packs them.
struct PackedRows {
    /// `[..., rows, width * bits / 32]` uint32.
    let words: MLXArray
    /// `[..., rows, width / groupSize]`.
    let scales: MLXArray
    /// Likewise.
    let biases: MLXArray
    let bits: Int
    let groupSize: Int

    /// Rows `[..., rows, width]`.
    init(packing rows: MLXArray, bits: Int, groupSize: Int) throws {
        let width = rows.dim(-1), count = rows.size / width
        func buffer(_ width: Int, _ dtype: DType) -> MLXArray {
            MLXArray.zeros([1, count, width], dtype: dtype)
        }
        let (w, s, b) = (
            buffer(width * bits / 32, .uint32), buffer(width / groupSize, rows.dtype),
            buffer(width / groupSize, rows.dtype)
        )
        let index = positions(0 ..< count).reshaped([1, count])
        let flat = rows.reshaped([1, count, width])
        var (words, scales, biases) = (mlx_array_new(), mlx_array_new(), mlx_array_new())
        let status = mlx_h2o_quantize_append(
            &words, &scales, &biases, w.ctx, s.ctx, b.ctx, index.ctx, flat.ctx, Int32(bits),
            Int32(groupSize), StreamOrDevice.default.ctx)
        let results = [words, scales, biases].map { MLXArray($0) }
        try checkEngine(status)
        let leading = Array(rows.shape.dropLast())
        self.words = results[0].reshaped(leading + [width * bits / 32])
        self.scales = results[1].reshaped(leading + [width / groupSize])
        self.biases = results[2].reshaped(leading + [width / groupSize])
        (self.bits, self.groupSize) = (bits, groupSize)
    }

    /// Of the rows as numbers, `[..., rows, width]`.
    var shape: [Int] { Array(words.shape.dropLast()) + [words.dim(-1) * 32 / bits] }

    /// The rows as float32, without rounding to the model's dtype.
    var dequantizedRows: MLXArray {
        dequantized(
            words, scales: scales.float32, biases: biases.float32, groupSize: groupSize, bits: bits)
    }
}
