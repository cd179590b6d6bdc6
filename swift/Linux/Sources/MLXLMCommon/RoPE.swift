import Foundation
import MLX
import MLXNN

/// A rotary encoding for one position or one for each batch row.
public typealias RoPELayer = OffsetLayer & ArrayOffsetLayer

/// The rows of `x` rotated to where the cache stands; 0 without one.
public func applyRotaryPosition<R: RoPELayer>(
    _ rope: R, to x: MLXArray, offset: RoPEOffset?
) -> MLXArray {
    switch offset {
    case nil: rope(x, offset: 0)
    case .scalar(let offset): rope(x, offset: offset)
    case .batch(let offsets): rope(x, offset: offsets)
    }
}

/// The encoding that a configuration names: plain, linearly scaled, or Llama 3's.
public func initializeRope(
    dims: Int, base: Float, traditional: Bool, scalingConfig: [String: StringOrNumber]?,
    maxPositionEmbeddings: Int?
) -> RoPELayer {
    func number(_ name: String, _ usual: Float) -> Float {
        scalingConfig?[name]?.asFloat() ?? usual
    }
    switch scalingConfig?["type"] ?? scalingConfig?["rope_type"] ?? .string("default") {
    case .string("default"):
        return RoPE(dimensions: dims, traditional: traditional, base: base)
    case .string("linear"):
        return RoPE(
            dimensions: dims, traditional: traditional, base: base, scale: 1 / number("factor", 1))
    case .string("llama3"):
        return Llama3RoPE(
            dimensions: dims, traditional: traditional, base: base, factor: number("factor", 1),
            low: number("low_freq_factor", 1), high: number("high_freq_factor", 4),
            trainedLength: number("original_max_position_embeddings", 8192))
    case let other:
        fatalError("the stand-in knows no RoPE of type \(other)")
    }
}

/// Llama 3.1's: slow rotations are slowed down by `factor`, fast ones are left, those between are
/// blended.
public final class Llama3RoPE: Module, OffsetLayer, ArrayOffsetLayer {
    let dimensions: Int
    let traditional: Bool
    /// Positions per radian.
    let _frequencies: MLXArray

    init(
        dimensions: Int, traditional: Bool, base: Float, factor: Float, low: Float, high: Float,
        trainedLength: Float
    ) {
        self.dimensions = dimensions
        self.traditional = traditional
        let frequencies = stride(from: 0, to: dimensions, by: 2).map { i -> Float in
            let plain = pow(base, Float(i) / Float(dimensions))
            let turns = trainedLength / (2 * .pi * plain)
            let kept = min(max((turns - low) / (high - low), 0), 1)
            return plain / ((1 - kept) / factor + kept)
        }
        _frequencies = MLXArray(frequencies)
    }

    public func callAsFunction(_ x: MLXArray, offset: Int) -> MLXArray {
        MLXFast.RoPE(
            x, dimensions: dimensions, traditional: traditional, base: nil, scale: 1,
            offset: offset, freqs: _frequencies)
    }

    public func callAsFunction(_ x: MLXArray, offset: MLXArray) -> MLXArray {
        MLXFast.RoPE(
            x, dimensions: dimensions, traditional: traditional, base: nil, scale: 1,
            offset: offset, freqs: _frequencies)
    }
}
