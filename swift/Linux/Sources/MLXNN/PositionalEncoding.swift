import MLX

/// Takes the position of the first row.
public protocol OffsetLayer: Module {
    func callAsFunction(_ x: MLXArray, offset: Int) -> MLXArray
}

/// Takes a position for each batch row.
public protocol ArrayOffsetLayer: Module {
    func callAsFunction(_ x: MLXArray, offset: MLXArray) -> MLXArray
}

/// Rotary position encoding.
public final class RoPE: Module, UnaryLayer, OffsetLayer, ArrayOffsetLayer {
    let dimensions: Int
    let traditional: Bool
    let base: Float
    let scale: Float

    public init(
        dimensions: Int, traditional: Bool = false, base: Float = 10_000, scale: Float = 1
    ) {
        self.dimensions = dimensions
        self.traditional = traditional
        self.base = base
        self.scale = scale
    }

    public func callAsFunction(_ x: MLXArray, offset: Int) -> MLXArray {
        MLXFast.RoPE(
            x, dimensions: dimensions, traditional: traditional, base: base, scale: scale,
            offset: offset)
    }

    public func callAsFunction(_ x: MLXArray, offset: MLXArray) -> MLXArray {
        MLXFast.RoPE(
            x, dimensions: dimensions, traditional: traditional, base: base, scale: scale,
            offset: offset)
    }

    public func callAsFunction(_ x: MLXArray) -> MLXArray { callAsFunction(x, offset: 0) }
}
