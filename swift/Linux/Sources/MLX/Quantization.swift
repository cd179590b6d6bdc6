import Cmlx

public enum QuantizationMode: String, Codable, Sendable {
    case affine
    case mxfp4
    case mxfp8
    case nvfp4
}

/// Rows packed along the last axis, `groupSize` values to a scale and a bias.
public func quantized(
    _ w: MLXArray, groupSize: Int? = nil, bits: Int? = nil, mode: QuantizationMode = .affine,
    globalScale: MLXArray? = nil, stream: StreamOrDevice = .default
) -> (wq: MLXArray, scales: MLXArray, biases: MLXArray?) {
    let packed = results {
        mlx_quantize(
            &$0, w.ctx, groupSize.asOptionalInt, bits.asOptionalInt, mode.rawValue,
            handle(globalScale),
            stream.ctx)
    }
    return (packed[0], packed[1], packed.count > 2 ? packed[2] : nil)
}

public func dequantized(
    _ w: MLXArray, scales: MLXArray, biases: MLXArray?, groupSize: Int? = nil, bits: Int? = nil,
    mode: QuantizationMode = .affine, globalScale: MLXArray? = nil, dtype: DType? = nil,
    stream: StreamOrDevice = .default
) -> MLXArray {
    let type = mlx_optional_dtype(
        value: (dtype ?? .float32).cmlxDtype, has_value: dtype != nil)
    return result {
        mlx_dequantize(
            &$0, w.ctx, scales.ctx, handle(biases), groupSize.asOptionalInt, bits.asOptionalInt,
            mode.rawValue, handle(globalScale), type, stream.ctx)
    }
}

public func quantizedMM(
    _ x: MLXArray, _ w: MLXArray, scales: MLXArray, biases: MLXArray?, transpose: Bool = true,
    groupSize: Int? = nil, bits: Int? = nil, mode: QuantizationMode = .affine,
    stream: StreamOrDevice = .default
) -> MLXArray {
    result {
        mlx_quantized_matmul(
            &$0, x.ctx, w.ctx, scales.ctx, handle(biases), transpose, groupSize.asOptionalInt,
            bits.asOptionalInt, mode.rawValue, stream.ctx)
    }
}
