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
