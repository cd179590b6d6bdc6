import Cmlx

/// MLX's fused operations.
public enum MLXFast {
    public static func RoPE(
        _ array: MLXArray, dimensions: Int, traditional: Bool, base: Float?, scale: Float,
        offset: Int, freqs: MLXArray? = nil, stream: StreamOrDevice = .default
    ) -> MLXArray {
        let base = mlx_optional_float(value: base ?? 0, has_value: base != nil)
        return result {
            mlx_fast_rope(
                &$0, array.ctx, Int32(dimensions), traditional, base, scale, Int32(offset),
                handle(freqs), stream.ctx)
        }
    }

    /// Offsets one per batch row, or one for all.
    public static func RoPE(
        _ array: MLXArray, dimensions: Int, traditional: Bool, base: Float?, scale: Float,
        offset: MLXArray, freqs: MLXArray? = nil, stream: StreamOrDevice = .default
    ) -> MLXArray {
        let base = mlx_optional_float(value: base ?? 0, has_value: base != nil)
        return result {
            mlx_fast_rope_dynamic(
                &$0, array.ctx, Int32(dimensions), traditional, base, scale, offset.ctx,
                handle(freqs),
                stream.ctx)
        }
    }

    public enum ScaledDotProductAttentionMaskMode {
        case none
        case array(MLXArray)
        case causal

        public var mask: MLXArray? {
            if case .array(let mask) = self { mask } else { nil }
        }

        public var mode: String {
            if case .causal = self { "causal" } else { "" }
        }
    }

    public static func scaledDotProductAttention(
        queries: MLXArray, keys: MLXArray, values: MLXArray, scale: Float,
        mask: ScaledDotProductAttentionMaskMode, sinks: MLXArray? = nil,
        stream: StreamOrDevice = .default
    ) -> MLXArray {
        result {
            mlx_fast_scaled_dot_product_attention(
                &$0, queries.ctx, keys.ctx, values.ctx, scale, mask.mode, handle(mask.mask),
                handle(sinks), stream.ctx)
        }
    }

    public static func scaledDotProductAttention(
        queries: MLXArray, keys: MLXArray, values: MLXArray, scale: Float, mask: MLXArray?,
        sinks: MLXArray? = nil, memoryEfficientThreshold: Int? = nil,
        stream: StreamOrDevice = .default
    ) -> MLXArray {
        scaledDotProductAttention(
            queries: queries, keys: keys, values: values, scale: scale,
            mask: mask.map { .array($0) } ?? .none, sinks: sinks, stream: stream)
    }

    public static func rmsNorm(
        _ x: MLXArray, weight: MLXArray, eps: Float, stream: StreamOrDevice = .default
    ) -> MLXArray { result { mlx_fast_rms_norm(&$0, x.ctx, weight.ctx, eps, stream.ctx) } }
}
